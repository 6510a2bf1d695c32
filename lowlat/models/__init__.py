"""Targets: geometry, checkpoints of the families, and the decoder as operations of a Program, which stands here,
too.
"""
