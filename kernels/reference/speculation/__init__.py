"""Dynamic trees: their likeliest drafts, grown level by level or at once, and what the next step verifies of them."""
