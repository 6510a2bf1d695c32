"""Measurements, run from a checkout: `python -m bench.dense`. Nothing of it is installed."""
