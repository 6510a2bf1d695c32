"""An MoE layer over many rows: pairs of a row and one of its experts grouped by expert, and grouped GEMMs.

Nothing here knows how experts were routed.
"""
