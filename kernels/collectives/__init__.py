"""Kernels of collectives: all-reduce and all-gather of rows, reduce-scatter of many rows, sums of gathered parts."""
