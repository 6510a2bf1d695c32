"""An MoE layer over few rows: top-k routing, both GEMMs and each row's sum, in one launch or one by one.

Nothing here knows the router's weights.
"""
