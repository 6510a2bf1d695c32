"""The gated activation as a device function: what the matrix product's epilogue and the stand-alone kernel share."""

import math
from typing import Any

from lowlat.kernels.numba_cuda import device_function, float32
from lowlat.kernels.ptx import add_rn, mul_rn

__all__ = ["silu_times"]


@device_function
def silu_times(gate: Any, up: Any) -> Any:
    """gate / (1 + exp(-gate)) * up in float32: exponential to an ulp or two, division and product rounded once."""
    return mul_rn(gate / add_rn(float32(1.0), math.exp(-gate)), up)
