"""P-EAGLE: an EAGLE3 draft model that drafts all positions in one pass. It builds on `lowlat.speculators.eagle3`."""
