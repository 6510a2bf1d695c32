"""This package has the speculators: their interface (base), the methods by name (methods), and the trees they draft."""
