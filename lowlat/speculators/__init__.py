"""This package has the speculators: their interface (base), the methods by name (methods), and draft trees (tree)."""
