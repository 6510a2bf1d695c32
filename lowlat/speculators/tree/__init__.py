"""Speculation trees: choices read from files, topology with paths and masks, and plans for other trees; the
shape and growth of dynamic trees.

"""
