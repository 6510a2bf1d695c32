"""Profiles of a decode step on a GPU: recording, times, the memory wall, traces."""
