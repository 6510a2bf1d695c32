"""This package answers calls in the runtime's own process: one thread runs the steps, and callers read the outputs."""
