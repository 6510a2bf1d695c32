"""This module rounds rows to e4m3 codes with a scale for each row; prefill multiplies FP8 weights by such rows."""

import torch

__all__ = ["LARGEST_CODE", "LEAST_PEAK", "code_rows"]

LARGEST_CODE = 448.0
LEAST_PEAK = 2.0**-64  # a row's largest magnitude counts as at least this, so that a row of zeros has a scale


def code_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to codes with scales: a row is about its codes times its scale; to nearest, ties to even.

    x  [M, K]  any float dtype, finite; a row with NaN or an infinite number gets codes that are NaN
    Returns the codes' numbers, [M, K] float32, and scales, [M, 1] float32. A scale is the row's largest magnitude over
    448. A number is multiplied by 448 over that magnitude, and each quotient and product is rounded once. A row's codes
    and scale depend on that row alone.
    """
    numbers = x.float()
    peaks = numbers.abs().amax(-1, keepdim=True).clamp_min(LEAST_PEAK)
    # torch divides by or of a Python number by multiplying by a reciprocal, which rounds twice; so tensors are used
    largest = torch.full_like(peaks, LARGEST_CODE)
    coded = (numbers * (largest / peaks)).clamp(-LARGEST_CODE, LARGEST_CODE)
    return coded.to(torch.float8_e4m3fn).float(), peaks / largest
