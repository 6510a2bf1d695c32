"""Gated activations as device functions: shared by GEMMs' epilogues and the stand-alone kernel."""

import math
from typing import Any

from lowlat.kernels.toolchain.numba_cuda import device_function, float32
from lowlat.kernels.toolchain.ptx import add_rn, div_rn, fma_rn, mul_rn, rcp_approx

__all__ = ["clamped_swiglu", "clamped_swiglu_uncalled", "silu_times", "silu_times_uncalled"]

SCALE = 2.0**-64
TINY = 2.0**-60


@device_function
def silu_times(gate: Any, up: Any) -> Any:
    """gate / (1 + exp(-gate)) * up in float32: exponential to an ulp or two, division and product rounded once."""
    return mul_rn(gate / add_rn(float32(1.0), math.exp(-gate)), up)


@device_function
def _quotient_uncalled(value: Any, total: Any) -> Any:
    """value / total, rounded once, of a total from 1 on, by a division that never calls.

    A quotient is put right twice by its remainder, which is exact where neither is near the ends of float32's range.
    """
    is_large = total > float32(1.0 / SCALE)
    divisor = mul_rn(total, float32(SCALE)) if is_large else total
    share = rcp_approx(divisor)
    share = fma_rn(share, fma_rn(-divisor, share, float32(1.0)), share)
    quotient = mul_rn(value, share)
    quotient = fma_rn(fma_rn(-divisor, quotient, value), share, quotient)
    quotient = fma_rn(fma_rn(-divisor, quotient, value), share, quotient)
    quotient = mul_rn(quotient, float32(SCALE)) if is_large else quotient
    quotient = value if total == float32(1.0) else quotient
    return mul_rn(value, float32(0.0)) if total == float32(math.inf) else quotient


@device_function
def silu_times_uncalled(gate: Any, up: Any) -> Any:
    """The bits of `silu_times`, by a division that never calls: products of a warpgroup run on beside no call."""
    quotient = _quotient_uncalled(gate, add_rn(float32(1.0), math.exp(-gate)))
    quotient = mul_rn(gate, float32(0.5)) if -float32(TINY) < gate < float32(TINY) else quotient
    return mul_rn(quotient, up)


@device_function
def _clamped(gate: Any, up: Any, limit: Any) -> Any:
    """Gate up to a limit, and up within it."""
    gate = limit if gate > limit else gate
    up = limit if up > limit else up
    return gate, -limit if up < -limit else up


@device_function
def clamped_swiglu(gate: Any, up: Any, limit: Any, alpha: Any) -> Any:
    """In float32, every product and sum rounded once; comparisons keep NaN."""
    gate, up = _clamped(gate, up, limit)
    share = div_rn(float32(1), add_rn(float32(1), math.exp(-mul_rn(gate, alpha))))
    return mul_rn(add_rn(up, float32(1)), mul_rn(gate, share))


@device_function
def clamped_swiglu_uncalled(gate: Any, up: Any, limit: Any, alpha: Any) -> Any:
    """The bits of `clamped_swiglu`, by a division that never calls, as `silu_times_uncalled`."""
    gate, up = _clamped(gate, up, limit)
    share = _quotient_uncalled(float32(1), add_rn(float32(1), math.exp(-mul_rn(gate, alpha))))
    return mul_rn(add_rn(up, float32(1)), mul_rn(gate, share))
