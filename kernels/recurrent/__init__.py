"""Kernels of gated delta nets: convolution, recurrence over a step's rows and over prompts, gated norm, lengths."""
