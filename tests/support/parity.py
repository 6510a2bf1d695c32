"""This module compares a target's tokens and logits with transformers' own, by one greedy request."""

from pathlib import Path
from typing import Any

import torch
from recording import traced
from tiny_models import transformers_logits

from lowlat import Runtime, SamplingParams

__all__ = ["TOLERANCE", "assert_close", "check_parity"]

TOLERANCE = 1e-4  # of a row's largest logit


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that each row agrees within the tolerance of its largest logit."""
    worst = ((found - expected).abs() / expected.abs().amax(-1, keepdim=True)).max()
    assert worst < TOLERANCE, f"relative difference {worst:.2e}"


def check_parity(directory: Path, model: Any, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Assert that a request's tokens are those of greedy transformers, and that logits are close; returns the tokens.

    It checks by induction: each token is the one that transformers chooses after all before it.
    """
    with Runtime.load(directory, **options) as runtime:
        tokens, logits = traced(runtime, prompt, SamplingParams(max_tokens=max_tokens))
    assert len(tokens) == max_tokens
    expected = transformers_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()
    assert_close(torch.stack([logits[len(prompt) + k] for k in range(max_tokens)]), expected)
    return tokens
