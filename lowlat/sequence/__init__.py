"""This package has the state that a slot keeps between steps: its buffers on the device, and the host's books of it."""
