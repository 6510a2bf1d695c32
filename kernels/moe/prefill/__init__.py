"""Kernels of an MoE layer over many rows: grouping of (row, expert) pairs by expert, and grouped GEMMs."""
