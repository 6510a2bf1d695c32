"""A P-EAGLE draft model is EAGLE3's, and drafts all positions in one pass."""
