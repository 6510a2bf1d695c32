"""This package measures decoding speed by scenarios and gates, compares results, and makes reports of them.

Runtimes are driven through what every caller has: submit, step, metrics.
"""
