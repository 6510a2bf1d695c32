"""This module norms every query and key head (Qwen3), alone; `rotate` does the same before it rotates.

A warp has a head of a row. Lane i has elements 4i to 4i + 3 of both halves, and of heads of 512 also 128 + 4i to
128 + 4i + 3. A head's norm sums each lane's squares by fused multiply-adds, the lower half first, and the lanes by a
butterfly (offsets 16, 8, 4, 2, 1). So a row's bits depend on the row alone. Values may be normed, too, without a
weight, and may be the keys before their norm.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_math import high_value, inverse_rms, lane_sum, low_value, normalised
from lowlat.kernels.common.norm_row import is_live, weights_label
from lowlat.kernels.elementwise.limits import MOST_HEAD, NORMED_HEAD
from lowlat.kernels.elementwise.norm import are_wide
from lowlat.kernels.reference.elementwise import elementwise as reference
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = [
    "THREADS",
    "WARPS",
    "HeadFunctions",
    "check_head_dim",
    "examples",
    "head_functions",
    "head_weights",
    "load_four",
    "qk_norm",
]

WARPS = 4
THREADS = WARPS * 32


def check_head_dim(dim: int) -> None:
    """Raise ShapeError unless the lanes of a warp hold a head of `dim` elements."""
    NORMED_HEAD.check("head_dim", dim)


def head_weights(
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    queries: int,
    groups: int,
    dim: int,
) -> tuple[Argument, Argument, bool]:
    """The weights of the norm of heads that are there, 0 for the others', and whether they are float32. Raises
    ShapeError."""
    found: list[Argument] = []
    for name, weight, heads in (("q_weight", q_weight, queries), ("k_weight", k_weight, groups)):
        if eps is None or not heads:
            found.append(0)
        elif weight is None:
            raise ShapeError(f"a norm of the heads needs {name}")
        else:
            check_shape(name, weight, dim)
            found.append(weight)
    there = [weight for weight in found if isinstance(weight, torch.Tensor)]
    return found[0], found[1], bool(there) and are_wide(*there)


@device_function
def load_four(address: Any, active: Any) -> Any:
    """Four float32; zeros in a lane past the head's end."""
    words = (uint32(0), uint32(0), uint32(0), uint32(0))
    if active:
        words = ptx.load_global_128(address)
    return (
        ptx.float_of_bits(words[0]),
        ptx.float_of_bits(words[1]),
        ptx.float_of_bits(words[2]),
        ptx.float_of_bits(words[3]),
    )


def weights_loader(wide: bool) -> tuple[Any, int]:
    """A device function that loads four weights of a head as float32; and their bytes. wide: they are float32."""
    return (load_four, 16) if wide else (_load_narrow, 8)


@device_function
def _load_narrow(address: Any, active: Any) -> Any:
    """Four bf16 as float32; zeros in a lane past the head's end."""
    words = (uint32(0), uint32(0))
    if active:
        words = ptx.load_global_64(address)
    return low_value(words[0]), high_value(words[0]), low_value(words[1]), high_value(words[1])


@device_function
def _store_four(address: Any, x: Any) -> None:
    a, b, c, d = ptx.bits_of_float(x[0]), ptx.bits_of_float(x[1]), ptx.bits_of_float(x[2]), ptx.bits_of_float(x[3])
    ptx.store_global_128(address, a, b, c, d)


@device_function
def _squares(total: Any, x: Any) -> Any:
    for k in range(4):
        total = ptx.fma_rn(x[k], x[k], total)
    return total


@device_function
def _scaled(x: Any, inverse: Any, weights: Any) -> Any:
    return (
        normalised(x[0], inverse, weights[0]),
        normalised(x[1], inverse, weights[1]),
        normalised(x[2], inverse, weights[2]),
        normalised(x[3], inverse, weights[3]),
    )


@device_function
def normed_head(low: Any, high: Any, low_weights: Any, high_weights: Any, live: Any, dim: Any, eps: Any) -> Any:
    """The norm of a head of which a lane has these elements; zeros for a dead row. All lanes must come here."""
    inverse = inverse_rms(lane_sum(_squares(_squares(float32(0.0), low), high)), dim, eps)
    low, high = _scaled(low, inverse, low_weights), _scaled(high, inverse, high_weights)
    if not live:
        low = high = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
    return low, high


@device_function
def _ones() -> Any:
    return float32(1.0), float32(1.0), float32(1.0), float32(1.0)


@device_function
def _zeros() -> Any:
    return float32(0.0), float32(0.0), float32(0.0), float32(0.0)


@device_function
def _load_two(address: Any, active: Any) -> Any:
    return load_four(address, active), load_four(address + int64(512), active)


@device_function
def _load_two_narrow(address: Any, active: Any) -> Any:
    return _load_narrow(address, active), _load_narrow(address + int64(256), active)


@device_function
def _store_two(address: Any, x: Any) -> None:
    _store_four(address, x[0])
    _store_four(address + int64(512), x[1])


@device_function
def _two_ones() -> Any:
    return _ones(), _ones()


@device_function
def _two_zeros() -> Any:
    return _zeros(), _zeros()


@device_function
def _two_normed(low: Any, high: Any, low_weights: Any, high_weights: Any, live: Any, dim: Any, eps: Any) -> Any:
    """As `normed_head`, of 16 elements a lane."""
    total = _squares(_squares(_squares(_squares(float32(0.0), low[0]), low[1]), high[0]), high[1])
    inverse = inverse_rms(lane_sum(total), dim, eps)
    low = _scaled(low[0], inverse, low_weights[0]), _scaled(low[1], inverse, low_weights[1])
    high = _scaled(high[0], inverse, high_weights[0]), _scaled(high[1], inverse, high_weights[1])
    if not live:
        low = high = _two_zeros()
    return low, high


@dataclass(frozen=True)
class HeadFunctions:
    """Device functions on what a lane has of each half of a head: four numbers, or twice four where heads are wide.

    is_wide       whether they are twice four
    load          float32 numbers, by their address
    load_weights  those of a norm, by their address; zeros in a lane past the head's end, as `load`
    step          bytes of a lane's weights, from its first to the next lane's
    zeros, ones   such numbers
    norm          the norm of a head; zeros for a dead row. All lanes must come here
    store         float32 numbers, to their address
    """

    is_wide: bool
    load: Any
    load_weights: Any
    step: int
    zeros: Any
    ones: Any
    norm: Any
    store: Any


def head_functions(dim: int, wide: bool) -> HeadFunctions:
    """The functions for heads of `dim` elements; wide: weights of norms are float32."""
    load_weights, step = weights_loader(wide)
    if dim <= MOST_HEAD:
        return HeadFunctions(False, load_four, load_weights, step, _zeros, _ones, normed_head, _store_four)
    load_two = _load_two if wide else _load_two_narrow
    return HeadFunctions(True, _load_two, load_two, step, _two_zeros, _two_ones, _two_normed, _store_two)


@cache
def _make_qk_norm(
    queries: int,
    keys: int,
    dim: int,
    eps: float,
    wide: bool = False,
    v_norm: bool = False,
    keys_as_values: bool = False,
) -> Kernel:
    """Grid (M, heads of a row / WARPS). wide: weights are float32."""
    functions = head_functions(dim, wide)
    load, load_weights, step, store = functions.load, functions.load_weights, functions.step, functions.store
    norm, ones = functions.norm, functions.ones
    count, num_normed = queries + 2 * keys, queries + keys
    half_bytes, given = dim // 8 * step, queries + keys if keys_as_values else count

    def qk_norm(qkv: Any, q_weight: Any, k_weight: Any, row_live: Any, out: Any) -> None:
        thread = uint32(cuda.threadIdx.x)
        lane, row = int64(thread & uint32(31)), int64(cuda.blockIdx.x)
        head = int64(cuda.blockIdx.y) * int64(WARPS) + int64(thread >> uint32(5))
        active, normed = lane < int64(dim // 8) and head < int64(count), head < int64(num_normed)
        weight = (q_weight if head < int64(queries) else k_weight) + lane * int64(step)
        low_weights = load_weights(weight, active and normed)
        high_weights = load_weights(weight + int64(half_bytes), active and normed)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = (row * int64(count) + head) * int64(4 * dim) + lane * int64(16)
        source = place
        if keys_as_values:
            source_head = head if normed else head - int64(keys)
            source = (row * int64(given) + source_head) * int64(4 * dim) + lane * int64(16)
        low, high = load(qkv + source, active), load(qkv + source + int64(2 * dim), active)
        if normed:
            low, high = norm(low, high, low_weights, high_weights, is_live(row_live, row), dim, eps)
        elif v_norm:
            low, high = norm(low, high, ones(), ones(), is_live(row_live, row), dim, eps)
        if active:
            store(out + place, low)
            store(out + place + int64(2 * dim), high)

    values = ("_v_norm" if v_norm else "") + ("_keys_as_values" if keys_as_values else "")
    name = f"qk_norm_q{queries}_k{keys}_d{dim}_eps{eps!r}{values}{weights_label(wide)}"
    return Kernel(name, qk_norm, (types.int64,) * 5, THREADS)


@launches(reference.qk_norm)
def qk_norm(given: Given) -> list[KernelCall]:
    """RMS norm of every query and key head, with the bits that `rotate` gives it; values pass through or are normed.

    The reference's `qk_norm`, in one launch: H or G may be 0, and then their weight is anything. Raises ShapeError for
    shapes or dtypes that do not fit, and for D that `limits.NORMED_HEAD` does not take.
    """
    heads, kv_heads, dim, rows = given.sizes("num_heads", "num_kv_heads", "head_dim", "M")
    count, params = heads + 2 * kv_heads, given.params
    check_head_dim(dim)
    check_shape("qkv", given["qkv"], rows, (count - kv_heads if params["keys_as_values"] else count) * dim)
    *weights, wide = head_weights(params["eps"], given["q_weight"], given.arrays.get("k_weight"), heads, kv_heads, dim)
    kernel = _make_qk_norm(heads, kv_heads, dim, params["eps"], wide, params["v_norm"], params["keys_as_values"])
    arguments = (given["qkv"], *weights, *given.take("row_live", "out"))
    return [KernelCall(kernel, (rows, -(-count // WARPS), 1), arguments)]


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make_qk_norm(32, 8, 128, 1e-6),
        _make_qk_norm(6, 2, 40, 1e-5),
        _make_qk_norm(16, 2, 256, 1e-6, True),
        _make_qk_norm(32, 16, 256, 1e-6, False, True),
        _make_qk_norm(32, 4, 512, 1e-6, False, True, True),
        _make_qk_norm(8, 0, 512, 1e-6, True),
    ]
