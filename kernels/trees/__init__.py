"""Kernels of dynamic trees: the likeliest drafts with their probabilities, growth, choice, masks and paths."""
