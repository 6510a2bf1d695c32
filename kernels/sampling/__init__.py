"""Sampling of tokens: draws, argmax, top-k, logprobs."""
