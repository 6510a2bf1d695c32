"""This package answers calls in the runtime's own process: a thread steps it, and callers read streams or answers."""
