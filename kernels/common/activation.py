"""Gated activations as device functions: shared by GEMMs' epilogues and the stand-alone kernel.

The logistic function is made of the GPU's own exponential and reciprocal, each within two ulps of float32: results
are rounded to bf16, whose ulp is 65,536 times as large, and an epilogue has little else to do.
"""

import math
from typing import Any

from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32
from lowlat.kernels.toolchain.ptx import (
    add_rn,
    bf16_bits,
    div_rn,
    exp2_approx,
    exp2_approx_ftz,
    float_of_bits,
    mul_rn,
    rcp_approx_ftz,
)

__all__ = ["clamped_swiglu", "gate_times", "logistic", "sigmoid", "silu_times"]

MINUS_LOG2_E = -1 / math.log(2)


@device_function
def logistic(value: Any) -> Any:
    """1 / (1 + exp(-value)): zero below -87."""
    return rcp_approx_ftz(add_rn(float32(1.0), exp2_approx_ftz(mul_rn(value, float32(MINUS_LOG2_E)))))


@device_function
def sigmoid(value: Any) -> Any:
    """1 / (1 + exp(-value)) where it stays float32: the quotient is rounded once; zero below -88."""
    return div_rn(float32(1.0), add_rn(float32(1.0), exp2_approx(mul_rn(value, float32(MINUS_LOG2_E)))))


@device_function
def gate_times(value: Any, gate: Any) -> Any:
    """value * sigmoid(gate), the gate and the sigmoid rounded to bf16 first; the product is not."""
    share = sigmoid(float_of_bits(uint32(uint32(bf16_bits(gate)) << uint32(16))))
    return mul_rn(value, float_of_bits(uint32(uint32(bf16_bits(share)) << uint32(16))))


@device_function
def silu_times(gate: Any, up: Any) -> Any:
    """gate / (1 + exp(-gate)) * up in float32, every product rounded once."""
    return mul_rn(mul_rn(gate, logistic(gate)), up)


@device_function
def clamped_swiglu(gate: Any, up: Any, limit: Any, alpha: Any) -> Any:
    """(up + 1) * gate / (1 + exp(-alpha * gate)) of gate up to a limit and up within it, in float32.

    Every product and sum is rounded once; comparisons keep NaN.
    """
    gate = limit if gate > limit else gate
    up = limit if up > limit else up
    up = -limit if up < -limit else up
    return mul_rn(add_rn(up, float32(1)), mul_rn(gate, logistic(mul_rn(gate, alpha))))
