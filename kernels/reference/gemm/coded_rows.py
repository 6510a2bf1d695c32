"""Rows as e4m3 codes with a scale for each, by which FP8 weights are multiplied in prefill."""

import torch

__all__ = ["LARGEST_CODE", "LEAST_PEAK", "code_rows"]

LARGEST_CODE = 448.0
LEAST_PEAK = 2.0**-64  # of a row's largest magnitude: of less, and of zeros, the scale is that of this


def code_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of rows and their scales: a row is its codes times its scale, rounded to nearest, ties to even.

    x  [M, K]  any float dtype, finite; a row with NaN or an infinite number has codes that are NaN
    Returns the codes' numbers, [M, K] float32, and scales, [M, 1] float32: a row's largest magnitude over 448. A number
    is multiplied by 448 over that magnitude; each quotient and product is rounded once. A row's depend on it alone.
    """
    numbers = x.float()
    peaks = numbers.abs().amax(-1, keepdim=True).clamp_min(LEAST_PEAK)
    # torch makes products with reciprocals of divisions by a number, or of one, which are rounded twice
    largest = torch.full_like(peaks, LARGEST_CODE)
    coded = (numbers * (largest / peaks)).clamp(-LARGEST_CODE, LARGEST_CODE)
    return coded.to(torch.float8_e4m3fn).float(), peaks / largest
