"""This package compiles Python functions to machine code: Numba's CUDA target, inline PTX, the compiler and its cache.

No kernel is here.
"""
