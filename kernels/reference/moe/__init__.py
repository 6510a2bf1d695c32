"""References of a mixture of experts."""
