"""References of attention and of the KV cache's writes and moves."""
