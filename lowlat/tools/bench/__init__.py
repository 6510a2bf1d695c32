"""This package measures decoding speed by scenarios and gates, compares results, and makes reports of them.

It drives runtimes through the public calls: submit, step, metrics.
"""
