"""This package schedules requests: it gives them slots and KV blocks, and chooses the next chunk of a prompt."""
