"""The state that a slot keeps between steps: buffers on the device, and the books that the host keeps of them."""
