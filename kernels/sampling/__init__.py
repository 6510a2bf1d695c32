"""Sampling of tokens: draws, argmax, top-k, logprobs. It knows no request."""
