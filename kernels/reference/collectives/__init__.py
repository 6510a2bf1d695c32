"""References of what ranks of a step exchange, and how extents are cut into parts for them."""
