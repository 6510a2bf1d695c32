"""Kernels of rows by which ranks exchange: parts gathered or added up, shares of many rows, sums of gathered parts."""
