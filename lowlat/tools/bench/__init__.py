"""Scenarios, gates, comparisons and reports of decoding speed, as result files that name their conditions.

Runtimes are driven through what every caller has: submit, step, metrics.
"""
