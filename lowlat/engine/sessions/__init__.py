"""A session is a conversation whose prefix stays cached while it lives; a file can keep it beyond the process."""
