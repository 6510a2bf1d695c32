"""Kernels of a step outside of models: its start (commands, active slots, rows), and its publication.

It knows tokens and lengths, and neither logits nor models.
"""
