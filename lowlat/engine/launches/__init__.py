"""This package launches steps, loops and prefill ahead of the host, and waits for what they publish."""
