"""Kernels of SpecPV besides attention: summaries of keys, the choice of blocks, and lists of blocks."""
