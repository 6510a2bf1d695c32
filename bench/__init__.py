"""Measurements, run from a checkout: `python -m bench.weights`. Nothing of it is installed."""
