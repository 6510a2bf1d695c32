"""Launches of steps, loops and prefill ahead of the host: what may be queued, what is waited for, and how."""
