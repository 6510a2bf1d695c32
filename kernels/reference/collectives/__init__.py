"""References of collectives among ranks, and the cut of extents into parts for them."""
