"""Profiles of a decode step on a card: recording, times, the memory wall, traces. It knows no command."""
