"""Attention of a prompt's rows: keys and values gathered from the paged cache, and flash attention over them."""
