"""GPUs as such: a watchdog of their work, and several of one host that reach each other's memory."""
