"""The memory of a runtime: its plan, what it holds of the device, and what requests without a slot take of the host."""
