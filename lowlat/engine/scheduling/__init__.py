"""This package schedules: who has a slot, which chunk of a prompt is next, and whose the blocks of the KV cache are."""
