"""Kernels by kind, references that say what operations mean, and the toolchain. Nothing here knows requests."""
