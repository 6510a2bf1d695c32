"""This package has several GPUs of one host that reach each other's memory, and a watchdog of a GPU's work."""
