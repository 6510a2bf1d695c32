"""This package is the host's side of decoding: the runtime, its scheduler, its requests, and the launches of steps."""
