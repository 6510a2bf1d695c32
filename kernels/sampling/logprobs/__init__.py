"""Kernels of logprobs: of drawn tokens with their likeliest alternatives, and of the tokens of prompts."""
