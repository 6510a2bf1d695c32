"""This package renders chat templates in a separate process, probes them, and adds tools to those that take none."""
