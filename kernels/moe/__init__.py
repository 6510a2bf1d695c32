"""MoE layers: packed experts, the router, and the GEMMs of few rows (`decode`) and of many (`prefill`).

Nothing here knows a model.
"""
