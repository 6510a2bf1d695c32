"""This module has gated activations as device functions, shared by GEMMs' epilogues and the stand-alone kernel.

The logistic function is computed by the GPU's own exponential and reciprocal, each within two ulps of float32. Results
are rounded to bf16, whose ulp is 65,536 times as large, and an epilogue has little time for more.
"""

import math
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32
from lowlat.kernels.toolchain.ptx import (
    add_rn,
    bf16_bits,
    div_rn,
    exp2_approx,
    exp2_approx_ftz,
    float_of_bits,
    fma_rn,
    mul_rn,
    rcp_approx_ftz,
)

__all__ = [
    "GELU_TANH",
    "SILU",
    "activation_label",
    "clamped_swiglu",
    "gate_times",
    "gated_activation",
    "gelu",
    "gelu_gate_times",
    "gelu_times",
    "logistic",
    "sigmoid",
    "silu_times",
    "soft_capped",
    "tanh",
]

SILU, GELU_TANH = "silu", "gelu_tanh"  # gated activations, by the reference's names
MINUS_LOG2_E = -1 / math.log(2)
GELU_LINEAR, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
SMALL = 0.625  # below it tanh(x) = x + x t P(t), t = x * x, within 1.3 * 2**-24 of tanh; fitted over (0, SMALL)
P0, P1, P2, P3, P4 = -0.3333328068, 0.1333144158, -0.05373971537, 0.02063908428, -0.005704985
TWICE_LOG2_E = 2 / math.log(2)


@device_function
def logistic(value: Any) -> Any:
    """Return 1 / (1 + exp(-value)); zero below -87."""
    return rcp_approx_ftz(add_rn(float32(1.0), exp2_approx_ftz(mul_rn(value, float32(MINUS_LOG2_E)))))


@device_function
def sigmoid(value: Any) -> Any:
    """Return 1 / (1 + exp(-value)) for results that stay float32: the quotient is rounded once; zero below -88."""
    return div_rn(float32(1.0), add_rn(float32(1.0), exp2_approx(mul_rn(value, float32(MINUS_LOG2_E)))))


@device_function
def gate_times(value: Any, gate: Any) -> Any:
    """Return value * sigmoid(gate); gate and sigmoid are rounded to bf16 first, the product is not."""
    share = sigmoid(float_of_bits(uint32(uint32(bf16_bits(gate)) << uint32(16))))
    return mul_rn(value, float_of_bits(uint32(uint32(bf16_bits(share)) << uint32(16))))


@device_function
def silu_times(gate: Any, up: Any) -> Any:
    """Return gate / (1 + exp(-gate)) * up in float32, every product rounded once."""
    return mul_rn(mul_rn(gate, logistic(gate)), up)


@device_function
def clamped_swiglu(gate: Any, up: Any, limit: Any, alpha: Any) -> Any:
    """Return (up + 1) * gate / (1 + exp(-alpha * gate)) in float32, gate at most `limit`, up within +-`limit`.

    Every product and sum is rounded once; the comparisons keep NaN.
    """
    gate = limit if gate > limit else gate
    up = limit if up > limit else up
    up = -limit if up < -limit else up
    return mul_rn(add_rn(up, float32(1)), mul_rn(gate, logistic(mul_rn(gate, alpha))))


@device_function
def gelu(value: Any) -> Any:
    """Return GELU by its tanh formula, 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3).

    It is computed as x / (1 + exp(-2 u)).
    """
    twice = mul_rn(value, fma_rn(mul_rn(value, value), float32(GELU_CUBIC), float32(GELU_LINEAR)))
    return mul_rn(value, logistic(twice))


@device_function
def gelu_times(gate: Any, up: Any) -> Any:
    """Return gelu(gate) * up in float32, every product rounded once."""
    return mul_rn(gelu(gate), up)


@device_function
def gelu_gate_times(value: Any, gate: Any) -> Any:
    """Return gelu(gate) * value; the gate is rounded to bf16 first, the product is not."""
    return mul_rn(gelu(float_of_bits(uint32(uint32(bf16_bits(gate)) << uint32(16)))), value)


@device_function
def tanh(value: Any) -> Any:
    """Return the hyperbolic tangent within two ulps of float32: a polynomial near zero, else 1 - 2 / (1 + exp(2 x))."""
    size = abs(value)
    square = mul_rn(value, value)
    series = fma_rn(square, float32(P4), float32(P3))
    series = fma_rn(series, square, float32(P2))
    series = fma_rn(series, square, float32(P1))
    series = fma_rn(series, square, float32(P0))
    small = fma_rn(mul_rn(series, square), value, value)
    power = exp2_approx(mul_rn(size, float32(TWICE_LOG2_E)))
    large = add_rn(float32(1.0), -div_rn(float32(2.0), add_rn(float32(1.0), power)))
    large = -large if value < float32(0.0) else large
    return small if size < float32(SMALL) else large


@device_function
def soft_capped(value: Any, cap: Any) -> Any:
    """Return cap * tanh(value / cap), quotient and product rounded; NaN stays NaN."""
    return mul_rn(tanh(div_rn(value, float32(cap))), float32(cap))


def gated_activation(name: str) -> Any:
    """Return the function of a gate and an up by the reference's name. Raises ShapeError for another name."""
    functions = {SILU: silu_times, GELU_TANH: gelu_times}
    if name not in functions:
        raise ShapeError(f"activation {name!r} is not one of {', '.join(functions)}")
    return functions[name]


def activation_label(name: str) -> str:
    """Return the suffix of a kernel's name for its activation; empty for SiLU."""
    return "" if name == SILU else f"_{name}"
