"""Kernels of a step's bookkeeping on the device: its start, its checks, and its publication."""
