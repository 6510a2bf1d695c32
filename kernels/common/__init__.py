"""Device functions that kernels of several folders share: memory, sums between warps, norms, random numbers."""
