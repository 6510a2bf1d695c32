"""Tiers of the prefix cache below the device's memory: host memory, and files."""
