"""Kernels of MoE layers: packed experts, the router, and GEMMs for few rows (`decode`) and for many (`prefill`)."""
