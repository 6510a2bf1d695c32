"""Gated activations as device functions: shared by GEMMs' epilogues and the stand-alone kernel."""

import math
from typing import Any

from lowlat.kernels.toolchain.numba_cuda import device_function, float32
from lowlat.kernels.toolchain.ptx import add_rn, div_rn, mul_rn

__all__ = ["clamped_swiglu", "silu_times"]


@device_function
def silu_times(gate: Any, up: Any) -> Any:
    """gate / (1 + exp(-gate)) * up in float32: exponential to an ulp or two, division and product rounded once."""
    return mul_rn(gate / add_rn(float32(1.0), math.exp(-gate)), up)


@device_function
def clamped_swiglu(gate: Any, up: Any, limit: Any, alpha: Any) -> Any:
    """In float32, every product and sum rounded once; comparisons keep NaN."""
    gate = limit if gate > limit else gate
    up = limit if up > limit else up
    up = -limit if up < -limit else up
    share = div_rn(float32(1), add_rn(float32(1), math.exp(-mul_rn(gate, alpha))))
    return mul_rn(add_rn(up, float32(1)), mul_rn(gate, share))
