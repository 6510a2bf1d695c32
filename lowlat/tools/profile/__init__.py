"""This package profiles a decode step on a GPU: recording, times, the memory wall, traces."""
