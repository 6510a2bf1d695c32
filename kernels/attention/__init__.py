"""Attention over the paged KV cache, and what writes, moves and gathers its keys and values. It knows no model."""
