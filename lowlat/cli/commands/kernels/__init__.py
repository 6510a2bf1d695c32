"""The commands about kernels: compiled ahead, tuned, profiled."""
