"""This module has device functions on whole rows: chunks of 16 bytes, rows of a weight in either layout, a row's norm.

A block of `norm_math.THREADS` threads has a row. Thread t has its chunks t, t + THREADS, .. and keeps the first in
registers, so a row of up to 8 * THREADS elements is read once.
"""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.common.norm_math import (
    THREADS,
    add_squares,
    block_sum,
    high_value,
    inverse_rms,
    low_value,
    normalised,
    normalised_pair,
)
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, uint32
from lowlat.kernels.toolchain.ptx import (
    add_rn,
    bf16_pair,
    float_of_bits,
    load_ahead_128,
    load_global_128,
    load_global_nc_128,
    load_global_u8,
    store_global_128,
)

__all__ = [
    "NormFunctions",
    "add_row",
    "chunk_address",
    "chunk_values",
    "gather_chunk",
    "is_live",
    "load_first",
    "make_norm_functions",
    "row_inverse",
    "store_row",
    "table_row",
    "weights_label",
]

TILE_BYTES = 2048  # 16 weight rows by 64 columns, see `packing`


@device_function
def table_row(table: Any, token: Any, width: Any, tiled: Any) -> Any:
    """Return the address of a weight's row: row-major [V, width], or in packed tiles as in `packing`."""
    row = int64(token)
    if tiled:
        steps = int64((width + 63) // 64)
        in_tile = ((row >> int64(3)) & int64(1)) * int64(1024) + (row & int64(7)) * int64(64)
        return int64(table + (row >> int64(4)) * steps * int64(TILE_BYTES) + in_tile)
    return int64(table + row * int64(width * 2))


@device_function
def chunk_address(row: Any, chunk: Any, tiled: Any) -> Any:
    """Return the address of 8 elements of a row of bf16, in either layout of `table_row`."""
    at = int64(chunk)
    if tiled:
        in_step = ((at >> int64(2)) & int64(1)) * int64(512) + (at & int64(3)) * int64(16)
        return int64(row + (at >> int64(3)) * int64(TILE_BYTES) + in_step)
    return int64(row + at * int64(16))


@device_function
def gather_chunk(table: Any, token: Any, chunk: Any, target: Any, width: Any, tiled: Any) -> None:
    """Copy 8 elements of a weight's row, in either layout of `table_row`, to a row; zeros for token -1."""
    words = (uint32(0), uint32(0), uint32(0), uint32(0))
    if token >= 0:
        words = load_global_nc_128(chunk_address(table_row(table, token, width, tiled), chunk, tiled))
    store_global_128(target + int64(chunk) * int64(16), words[0], words[1], words[2], words[3])


@device_function
def is_live(row_live: Any, row: Any) -> Any:
    """Return whether a row is live; all are if the address of the flags is 0."""
    live = True
    if row_live != int64(0):
        live = load_global_u8(row_live + int64(row)) != uint32(0)
    return live


@device_function
def load_first(row: Any, width: Any, tiled: Any) -> Any:
    """Load this thread's first chunk of a row, four words; zeros past the row's end."""
    thread = uint32(cuda.threadIdx.x)
    words = (uint32(0), uint32(0), uint32(0), uint32(0))
    if thread < uint32(width // 8):
        words = load_global_128(chunk_address(row, thread, tiled))
    return words


@device_function
def store_row(first: Any, source: Any, tiled: Any, target: Any, live: Any, width: Any) -> None:
    """Store a row, zeros for a dead one. Its threads hold their first chunks; the others are copied from `source`."""
    chunk, chunks = uint32(cuda.threadIdx.x), uint32(width // 8)
    words = first
    while chunk < chunks:
        if not live:
            words = (uint32(0), uint32(0), uint32(0), uint32(0))
        store_global_128(target + int64(chunk) * int64(16), words[0], words[1], words[2], words[3])
        chunk = uint32(chunk + uint32(THREADS))
        if chunk < chunks:
            words = load_global_128(chunk_address(source, chunk, tiled))


@device_function
def chunk_values(row: Any, chunk: Any, wide: Any) -> Any:
    """Load 8 elements of a row as float32, from float32 (wide) or bf16."""
    if wide:
        address = row + int64(chunk) * int64(32)
        a, b, c, d = load_global_128(address)
        e, f, g, h = load_global_128(address + int64(16))
        return (
            float_of_bits(a),
            float_of_bits(b),
            float_of_bits(c),
            float_of_bits(d),
            float_of_bits(e),
            float_of_bits(f),
            float_of_bits(g),
            float_of_bits(h),
        )
    a, b, c, d = load_global_128(row + int64(chunk) * int64(16))
    return (
        low_value(a),
        high_value(a),
        low_value(b),
        high_value(b),
        low_value(c),
        high_value(c),
        low_value(d),
        high_value(d),
    )


@device_function
def add_row(a: Any, b: Any, wide: Any, target: Any, width: Any) -> Any:
    """Store the sum of two rows, rounded to bf16. Returns this thread's first chunk of it, zeros past the end.

    a     bf16
    b     float32 (wide) or bf16
    """
    thread = uint32(cuda.threadIdx.x)
    first = (uint32(0), uint32(0), uint32(0), uint32(0))
    chunk = thread
    while chunk < uint32(width // 8):
        x = chunk_values(a, chunk, False)
        y = chunk_values(b, chunk, wide)
        words = (
            bf16_pair(add_rn(x[0], y[0]), add_rn(x[1], y[1])),
            bf16_pair(add_rn(x[2], y[2]), add_rn(x[3], y[3])),
            bf16_pair(add_rn(x[4], y[4]), add_rn(x[5], y[5])),
            bf16_pair(add_rn(x[6], y[6]), add_rn(x[7], y[7])),
        )
        store_global_128(target + int64(chunk) * int64(16), words[0], words[1], words[2], words[3])
        if chunk == thread:
            first = words
        chunk = uint32(chunk + uint32(THREADS))
    return first


@device_function
def row_inverse(first: Any, source: Any, tiled: Any, sums: Any, width: Any, eps: Any) -> Any:
    """Return 1 / rms of a row. Its threads hold their first chunks; the others are read from `source`.

    sums  [WARPS] float32, shared; all threads of the block must call it, once
    """
    thread, chunks = uint32(cuda.threadIdx.x), uint32(width // 8)
    more = width > 8 * THREADS  # a constant: rows of one chunk a thread compile without the loads below
    total = add_squares(float32(0.0), first[0], first[1], first[2], first[3])
    chunk = uint32(thread + uint32(THREADS))
    while more and chunk < chunks:
        a, b, c, d = load_global_128(chunk_address(source, chunk, tiled))
        total = add_squares(total, a, b, c, d)
        chunk = uint32(chunk + uint32(THREADS))
    return inverse_rms(block_sum(total, sums), width, eps)


@dataclass(frozen=True)
class NormFunctions:
    """Device functions of a norm whose weight is bf16, or float32.

    load_weights  loads a chunk of the weight by its address and the chunk's number: `size` words
    load_ahead    does the same, by a load that stays before the wait: see `ptx.load_ahead_128`
    no_weights    returns as many zeros
    held          takes a chunk's weights from an array, from a place on
    scale         multiplies a chunk's four words by 1 / rms and the chunk's weights, and packs them again
    load_first    loads this thread's first chunk of the weight, before the previous kernel has ended
    finish        `finish_norm`
    """

    size: int
    load_weights: Any
    load_ahead: Any
    no_weights: Any
    held: Any
    scale: Any
    load_first: Any
    finish: Any


def weights_label(wide: bool) -> str:
    """Return the suffix of a kernel's name for the dtype of a norm's weight."""
    return "_w32" if wide else ""


def make_norm_functions(wide: bool) -> NormFunctions:
    """Make the device functions for a weight of float32 (wide), or of bf16."""
    load_weights, load_ahead, no_weights, held, scale = (
        (_load_wide, _load_wide_ahead, _no_wide, _held_wide, _scale_wide)
        if wide
        else (_load_narrow, _load_narrow_ahead, _no_narrow, _held_narrow, _scale_narrow)
    )

    @device_function
    def load_first_weights(weight: Any, width: Any) -> Any:
        thread = uint32(cuda.threadIdx.x)
        words = no_weights()
        if thread < uint32(width // 8):
            words = load_ahead(weight, thread)
        return words

    @device_function
    def finish_norm(
        first: Any,
        first_weights: Any,
        source: Any,
        tiled: Any,
        weight: Any,
        target: Any,
        copy: Any,
        live: Any,
        sums: Any,
        width: Any,
        eps: Any,
    ) -> None:
        """Store the RMS norm of a row. Its threads hold their first chunks; the others are read from `source`.

        target, copy  addresses of the result and of a second copy, 0 for none; zeros for a dead row
        sums          [WARPS] float32, shared; all threads of the block must call it, once
        """
        chunk, chunks = uint32(cuda.threadIdx.x), uint32(width // 8)
        more = width > 8 * THREADS  # a constant: rows of one chunk a thread compile without the loads below
        inverse = row_inverse(first, source, tiled, sums, width, eps)
        words, weights = first, first_weights
        while chunk < chunks:
            a, b, c, d = scale(words, inverse, weights)
            if not live:
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            offset = int64(chunk) * int64(16)
            store_global_128(target + offset, a, b, c, d)
            if copy != int64(0):
                store_global_128(copy + offset, a, b, c, d)
            chunk = uint32(chunk + uint32(THREADS))
            if more and chunk < chunks:
                words = load_global_128(chunk_address(source, chunk, tiled))
                weights = load_weights(weight, chunk)

    size = 8 if wide else 4
    return NormFunctions(size, load_weights, load_ahead, no_weights, held, scale, load_first_weights, finish_norm)


def _make_loaders(load_128: Any) -> tuple[Any, Any]:
    """Make the loads of a chunk's weights, of bf16 and of float32, from an instruction of 16 bytes."""

    @device_function
    def load_narrow(weight: Any, chunk: Any) -> Any:
        return load_128(weight + int64(chunk) * int64(16))

    @device_function
    def load_wide(weight: Any, chunk: Any) -> Any:
        a, b, c, d = load_128(weight + int64(chunk) * int64(32))
        e, f, g, h = load_128(weight + int64(chunk) * int64(32) + int64(16))
        return a, b, c, d, e, f, g, h

    return load_narrow, load_wide


_load_narrow, _load_wide = _make_loaders(load_global_nc_128)
_load_narrow_ahead, _load_wide_ahead = _make_loaders(load_ahead_128)


@device_function
def _no_narrow() -> Any:
    return uint32(0), uint32(0), uint32(0), uint32(0)


@device_function
def _no_wide() -> Any:
    return uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0)


@device_function
def _held_narrow(words: Any, at: Any) -> Any:
    return words[at], words[at + 1], words[at + 2], words[at + 3]


@device_function
def _held_wide(words: Any, at: Any) -> Any:
    first, second = _held_narrow(words, at), _held_narrow(words, at + 4)
    return first[0], first[1], first[2], first[3], second[0], second[1], second[2], second[3]


@device_function
def _scale_narrow(words: Any, inverse: Any, weights: Any) -> Any:
    return (
        normalised_pair(words[0], inverse, weights[0]),
        normalised_pair(words[1], inverse, weights[1]),
        normalised_pair(words[2], inverse, weights[2]),
        normalised_pair(words[3], inverse, weights[3]),
    )


@device_function
def _scale_wide(words: Any, inverse: Any, weights: Any) -> Any:
    return (
        _wide_pair(words[0], inverse, weights[0], weights[1]),
        _wide_pair(words[1], inverse, weights[2], weights[3]),
        _wide_pair(words[2], inverse, weights[4], weights[5]),
        _wide_pair(words[3], inverse, weights[6], weights[7]),
    )


@device_function
def _wide_pair(word: Any, inverse: Any, low: Any, high: Any) -> Any:
    """Normalise two packed bf16 elements by two float32 weights, given as bits, and pack them again."""
    return bf16_pair(
        normalised(low_value(word), inverse, float_of_bits(low)),
        normalised(high_value(word), inverse, float_of_bits(high)),
    )
