"""GEMMs with packed weights: `decode` for 1 to 64 rows, `prefill` for hundreds.

Nothing here knows a model.
"""
