"""This package has tables of tuned plans by GPU, reads them, and chooses a launch's plan.

A table belongs to one GPU. It has an entry for each launch that was measured there, by the launch's kind and key. An
entry has the knobs of the fastest plan. Knobs change no bit of any result; the partition of K and the splits of
attention change bits, so they are not knobs.
"""
