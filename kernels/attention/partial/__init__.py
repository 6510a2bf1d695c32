"""Kernels of SpecPV beside attention: summaries of keys, the choice of blocks, and what lists of blocks leave out."""
