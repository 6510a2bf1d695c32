"""References of collectives among ranks, and the partition of extents among ranks."""
