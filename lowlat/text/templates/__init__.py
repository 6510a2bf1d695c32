"""This package renders chat templates in a process apart, probes them, and helps those that take no tools."""
