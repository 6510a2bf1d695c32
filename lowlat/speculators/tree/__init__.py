"""Speculation trees: choices read from files, topology with paths and masks, and plans for other trees; dynamic ones,
their shape and their growth.

It knows no speculator.
"""
