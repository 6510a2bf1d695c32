"""This package launches steps, loops and prefill ahead of their results, and waits for their publications."""
