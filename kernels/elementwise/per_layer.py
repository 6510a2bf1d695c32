"""This module makes a token's embeddings for each layer: all layers' inputs, once a forward pass, and a layer's gate.

A warp norms the inputs of a row and a layer. Lane i has chunks i, i + 32, .. of 8 elements and adds their squares in
order by fused multiply-adds, then the lanes' sums by a butterfly. So a row's bits depend on the row alone.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import gelu_gate_times
from lowlat.kernels.common.norm_math import add_squares, high_value, inverse_rms, lane_sum, low_value
from lowlat.kernels.common.norm_row import chunk_values, is_live, make_norm_functions, weights_label
from lowlat.kernels.elementwise.limits import CHUNKS, LAYER_INPUTS
from lowlat.kernels.elementwise.norm import are_wide, check_dtype
from lowlat.kernels.reference.elementwise import elementwise as reference
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "layer_columns", "per_layer_gate", "per_layer_inputs"]

WARPS = 4
THREADS = WARPS * 32
CHUNK = 8
HALF_ROOT = 2**-0.5


@device_function
def _scaled_pair(low: Any, high: Any, factor: Any) -> Any:
    """Two numbers rounded to bf16, times a factor, rounded again."""
    word = ptx.bf16_pair(low, high)
    return ptx.bf16_pair(ptx.mul_rn(low_value(word), factor), ptx.mul_rn(high_value(word), factor))


@device_function
def _joined_pair(word: Any, other: Any) -> Any:
    """The sum of two pairs, rounded, times the root of a half, rounded."""
    total = ptx.bf16_pair(
        ptx.add_rn(low_value(word), low_value(other)), ptx.add_rn(high_value(word), high_value(other))
    )
    by = float32(HALF_ROOT)
    return ptx.bf16_pair(ptx.mul_rn(low_value(total), by), ptx.mul_rn(high_value(total), by))


@cache
def _make_inputs(size: int, layers: int, scale: float, eps: float, wide: bool = False) -> Kernel:
    """Grid (M, layers / WARPS). wide: the norm's weight is float32."""
    chunks, functions = size // CHUNK, make_norm_functions(wide)
    own = -(-chunks // 32)
    num_words, scale_words, load_weights = 4 * own, functions.scale, functions.load_weights

    def per_layer_inputs(projected: Any, embedded: Any, weight: Any, row_live: Any, out: Any) -> None:
        words = cuda.local.array(num_words, uint32)
        thread, row = uint32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        lane = uint32(thread & uint32(31))
        layer = uint32(uint32(cuda.blockIdx.y) * uint32(WARPS) + (thread >> uint32(5)))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if layer < uint32(layers):
            at = row * int64(layers * size) + int64(layer) * int64(size)
            total = float32(0.0)
            for part in range(own):
                chunk, place = uint32(lane + uint32(32 * part)), 4 * part
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                if chunk < uint32(chunks):
                    v, by = chunk_values(projected + at * int64(4), chunk, True), float32(scale)
                    a, b = _scaled_pair(v[0], v[1], by), _scaled_pair(v[2], v[3], by)
                    c, d = _scaled_pair(v[4], v[5], by), _scaled_pair(v[6], v[7], by)
                words[place], words[place + 1], words[place + 2], words[place + 3] = a, b, c, d
                total = add_squares(total, a, b, c, d)
            inverse, live = inverse_rms(lane_sum(total), size, eps), is_live(row_live, row)
            for part in range(own):
                chunk, place = uint32(lane + uint32(32 * part)), 4 * part
                if chunk < uint32(chunks):
                    held = words[place], words[place + 1], words[place + 2], words[place + 3]
                    a, b, c, d = scale_words(held, inverse, load_weights(weight, chunk))
                    offset = at * int64(2) + int64(chunk) * int64(16)
                    e, f, g, h = ptx.load_global_128(embedded + offset)
                    a, b, c, d = _joined_pair(a, e), _joined_pair(b, f), _joined_pair(c, g), _joined_pair(d, h)
                    if not live:
                        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                    ptx.store_global_128(out + offset, a, b, c, d)

    name = f"per_layer_inputs_{layers}x{size}_scale{scale!r}_eps{eps!r}{weights_label(wide)}"
    return Kernel(name, per_layer_inputs, (types.int64,) * 5, THREADS, waits_before_trigger=True)


@cache
def _make_gate(size: int, pitch: int) -> Kernel:
    """Grid (M, chunks of a row / THREADS)."""

    def per_layer_gate(gate: Any, inputs: Any, first: Any, row_live: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(size // CHUNK):
            g = chunk_values(gate + row * int64(4 * size), chunk, True)
            v = chunk_values(inputs + row * int64(2 * pitch) + first * int64(2), chunk, False)
            a = ptx.bf16_pair(gelu_gate_times(v[0], g[0]), gelu_gate_times(v[1], g[1]))
            b = ptx.bf16_pair(gelu_gate_times(v[2], g[2]), gelu_gate_times(v[3], g[3]))
            c = ptx.bf16_pair(gelu_gate_times(v[4], g[4]), gelu_gate_times(v[5], g[5]))
            d = ptx.bf16_pair(gelu_gate_times(v[6], g[6]), gelu_gate_times(v[7], g[7]))
            if not is_live(row_live, row):
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            ptx.store_global_128(out + row * int64(2 * size) + int64(chunk) * int64(16), a, b, c, d)

    return Kernel(
        f"per_layer_gated_{size}_of{pitch}", per_layer_gate, (types.int64,) * 5, THREADS, waits_before_trigger=True
    )


@launches(reference.per_layer_inputs)
def per_layer_inputs(given: Given) -> list[KernelCall]:
    """(norm(projected * scale) + embedded) / sqrt 2 by layer, rounded to bf16 after each operation, in one launch.

    Raises ShapeError for rows of no whole layers, P outside of LAYER_INPUTS, and activations that are not bf16.
    """
    rows, width, size = given.sizes("M", "W", "P")
    LAYER_INPUTS.check("inputs of a layer", size)
    if width % size:
        raise ShapeError(f"rows have whole layers of {size} inputs, got {width}")
    check_dtype(torch.bfloat16, embedded=given["embedded"])
    layers, wide = width // size, are_wide(given["weight"])
    kernel = _make_inputs(size, layers, given.params["scale"], given.params["eps"], wide)
    arguments = given.take("projected", "embedded", "weight", "row_live", "out")
    return [KernelCall(kernel, (rows, -(-layers // WARPS), 1), arguments)]


@launches(reference.per_layer_gate)
def per_layer_gate(given: Given) -> list[KernelCall]:
    """gelu(gate) * the layer's inputs, the gate rounded to bf16 first; dead rows give zero. One launch.

    Raises ShapeError unless the layer is there, P is a multiple of 8 and activations are bf16.
    """
    (rows, size, width), layer = given.sizes("M", "P", "W"), given.params["layer"]
    check_shape("inputs", layer_columns(given["inputs"], size, layer), rows, size)
    check_dtype(torch.bfloat16, inputs=given["inputs"])
    CHUNKS.check("columns of out", size)
    grid = (rows, -(-(size // CHUNK) // THREADS), 1)
    arguments = (given["gate"], given["inputs"], layer * size, given.get("row_live"), given["out"])
    return [KernelCall(_make_gate(size, width), grid, arguments)]


def layer_columns(inputs: torch.Tensor, size: int, layer: int) -> torch.Tensor:
    """A layer's inputs [M, P] of all layers' [M, L * P], without a copy."""
    return inputs[:, layer * size : (layer + 1) * size]


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make_inputs(256, 42, 2560**-0.5, 1e-6),
        _make_inputs(264, 3, 0.125, 1e-6, True),
        _make_gate(256, 42 * 256),
    ]
