"""Geometry in, operations out: the decoder of a target and the EAGLE3 head, as parts of a Program."""
