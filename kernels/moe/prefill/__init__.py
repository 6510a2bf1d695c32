"""A mixture of experts of many rows: pairs of a row and a rank grouped by expert, and grouped GEMMs over them.

Nothing here knows how experts were routed.
"""
