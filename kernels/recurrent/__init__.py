"""Kernels of gated delta nets: convolution, the delta rule over a step's rows and over prompts, gated norm, lengths."""
