"""This package compiles Python functions to machine code: Numba's CUDA target, inline PTX, the compiler and its cache.

The kernels themselves are in the other folders.
"""
