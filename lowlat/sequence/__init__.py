"""This package has what a slot keeps between steps: buffers on the device, and the host's books of them."""
