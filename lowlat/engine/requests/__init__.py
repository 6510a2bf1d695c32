"""Requests: what each asks for and has got so far, the checks of what may be asked, and prompts that grow."""
