"""Kernels of an MoE layer over few rows: top-k routing, both GEMMs and each row's sum, in one launch or several."""
