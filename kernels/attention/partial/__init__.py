"""Kernels of SpecPV next to attention: summaries of keys, the choice of blocks, and what lists of blocks leave out."""
