"""Kernels of drafts by their probabilities: how sure a draft model is; growth, choice and paths of dynamic trees."""
