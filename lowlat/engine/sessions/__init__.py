"""A session is a conversation whose prefix stays while it lives, and outlives the process in a file."""
