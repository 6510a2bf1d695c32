"""This package has tuned plans by GPU: the shipped tables, their reader, and the choice of a launch's plan.

A table belongs to one GPU. It has an entry for each launch that was measured there, by the launch's kind and key, and
an entry has the knobs of the fastest plan. Knobs change no bit of any result: the partition of K and the splits of
attention, which would, are not knobs.
"""
