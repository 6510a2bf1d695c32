"""Attention over the paged KV cache, and kernels that write, move and gather keys and values."""
