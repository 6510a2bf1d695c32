"""This module multiplies one warp's steps of an expert's GEMM: 16 weight rows by 64 columns times up to eight inputs.

The weights' format converts its words to operands of mma, see `lowlat.kernels.formats`.
"""

from typing import Any

from lowlat.kernels.moe.plan import ExpertPlan, ExpertShape
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["make_multiply"]


def make_multiply(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A device function that adds a part of a tile to a warp's four sums.

    It takes the sums, the addresses of the lane's words and scales, its inputs, and the number of the part's steps.
    """
    part, step_bytes, scale_bytes = plan.part, shape.step_bytes, shape.scale_bytes
    even, (_, multiply) = plan.is_even(shape), shape.format.decode_fragment()

    @device_function
    def multiply_part(sums: Any, words: Any, scales: Any, x: Any, count: Any) -> Any:
        if even or count > uint32(0):
            sums = multiply(sums, words, scales, x[0])
        if part > 1 and (even or count > uint32(1)):
            sums = multiply(sums, uint32(words + uint32(step_bytes)), uint32(scales + uint32(scale_bytes)), x[1])
        if part > 2 and (even or count > uint32(2)):
            sums = multiply(
                sums, uint32(words + uint32(2 * step_bytes)), uint32(scales + uint32(2 * scale_bytes)), x[2]
            )
        return sums

    return multiply_part
