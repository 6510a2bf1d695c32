"""The schedule: who has a slot, which chunk of a prompt runs next, and which blocks of the KV cache are whose."""
