"""Speculation trees: choices read from files, topology with paths and masks, and plans for other trees; the shape of dynamic
trees, and how they are grown.

It knows no speculator.
"""
