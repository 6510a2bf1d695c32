"""Targets: geometry, checkpoints of the families, and the decoder as operations of a Program.

It knows no speculator.
"""
