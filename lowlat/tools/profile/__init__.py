"""Profiles of a decode step on a card: recording, times by stage and kernel, the memory wall, traces."""
