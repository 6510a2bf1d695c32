"""This module has the causal convolution of a gated delta net as kernels, for a step's rows and for a prompt's chunk.

A thread has four channels of a slot's rows, or of eight rows of a chunk. A step's thread stores the inputs of its
channels in the ring. In a chunk, the threads with its first rows read the inputs before them from the ring. Then they
write the inputs there that later steps read; no other threads of the chunk access these channels of the ring. A
prompt's thread loads all its rows at once, before it knows which are live. Warps of a block have consecutive runs of
rows, so that the three rows before a run are read from memory once for both.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, divide, int_at
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.recurrent.delta_math import convolved, convolved_pair, four_numbers, rounded
from lowlat.kernels.recurrent.delta_rule import check_taps, snapshot_pairs
from lowlat.kernels.recurrent.limits import TAPS
from lowlat.kernels.reference.recurrent import delta_conv as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["delta_conv", "examples", "prefill_delta_conv"]

THREADS = 128
FOUR = 4  # channels of a thread
RUN = 8  # rows of a thread of a prompt's chunk, not less than TAPS - 1
KEPT = TAPS - 1
WARPS = THREADS // 32  # of a block, which have a chunk's runs that follow each other
WARP_CHANNELS = 32 * FOUR


@device_function
def _rounded_four(address: Any) -> Any:
    x = four_numbers(ptx.load_global_128(address))
    return rounded(x[0]), rounded(x[1]), rounded(x[2]), rounded(x[3])


@device_function
def _pairs_of_four(address: Any) -> Any:
    """Four float32 as two packed pairs."""
    x = four_numbers(ptx.load_global_128(address))
    return ptx.bf16_pair(x[0], x[1]), ptx.bf16_pair(x[2], x[3])


@device_function
def _kept_pairs(address: Any, known: Any) -> Any:
    """Four inputs of the ring as two packed pairs; zeros before position 0."""
    low, high = uint32(0), uint32(0)
    if known:
        low, high = ptx.load_global_64(address)
    return low, high


@device_function
def _store_four(address: Any, x: Any) -> None:
    ptx.store_global_64(address, ptx.bf16_pair(x[0], x[1]), ptx.bf16_pair(x[2], x[3]))


@cache
def _make(width: int, channels: int, ring: int, rows: int) -> Kernel:
    """Grid (B, channels / (FOUR * THREADS)); rows of a slot, live ones first, all of which a thread has."""

    @device_function
    def kept_four(row: Any, start: Any, channel: Any, states: Any) -> Any:
        """Four inputs before row 0, which is at position `start`."""
        known = start + row >= int64(0)
        place = divide(start + row, ring)[1] if known else int64(0)
        low, high = _kept_pairs(states + (place * int64(channels) + channel) * int64(2), known)
        return low_value(low), high_value(low), low_value(high), high_value(high)

    def delta_conv_kernel(
        x: Any,
        taps: Any,
        slots: Any,
        origin: Any,
        row_live: Any,
        conv_state: Any,
        out: Any,
        count: Any,
    ) -> None:
        owner = int64(cuda.blockIdx.x)
        channel = (int64(cuda.blockIdx.y) * int64(THREADS) + int64(cuda.threadIdx.x)) * int64(FOUR)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if channel >= int64(channels):
            return
        u0, u1, v0, v1 = ptx.load_global_nc_128(taps + channel * int64(2 * TAPS))
        w0, w1, y0, y1 = ptx.load_global_nc_128(taps + channel * int64(2 * TAPS) + int64(16))
        slot, start, base, live = int_at(slots, owner), int64(0), owner * int64(rows), int64(0)
        if slot >= int64(0):
            for row in range(rows):
                live += int64(byte_at(row_live, base + int64(row)) != int64(0))
            start = int_at(origin, owner)
        own = x + base * int64(4 * width)
        states = conv_state + slot * int64(ring * channels * 2)
        a = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
        b, c = a, a
        if int64(0) < live:
            a = kept_four(int64(-3), start, channel, states)
            b = kept_four(int64(-2), start, channel, states)
            c = kept_four(int64(-1), start, channel, states)
        for turn in range(rows):
            row = int64(turn)
            target = out + ((base + row) * int64(channels) + channel) * int64(2)
            if row < live:
                d = _rounded_four(own + (row * int64(width) + channel) * int64(4))
                made = (
                    convolved(a[0], b[0], c[0], d[0], low_value(u0), high_value(u0), low_value(u1), high_value(u1)),
                    convolved(a[1], b[1], c[1], d[1], low_value(v0), high_value(v0), low_value(v1), high_value(v1)),
                    convolved(a[2], b[2], c[2], d[2], low_value(w0), high_value(w0), low_value(w1), high_value(w1)),
                    convolved(a[3], b[3], c[3], d[3], low_value(y0), high_value(y0), low_value(y1), high_value(y1)),
                )
                _store_four(target, made)
                a, b, c = b, c, d
                place = divide(start + row, ring)[1]
                _store_four(states + (place * int64(channels) + channel) * int64(2), d)
            elif row < count:
                ptx.store_global_64(target, uint32(0), uint32(0))

    name = f"gated_delta_conv_{rows}_{width}_{channels}_{ring}"
    return Kernel(name, delta_conv_kernel, (types.int64,) * 8, THREADS, waits_before_trigger=True)


@cache
def _make_prefill(width: int, channels: int, ring: int, pairs: int) -> Kernel:
    """Grid (channels / WARP_CHANNELS, runs of a chunk's rows / WARPS).

    pairs  of a row of the states and a number of the chunk's positions; -1: no snapshots are given
    """
    num_words, num_loaded = 2 * (RUN + KEPT), 4 * (RUN + KEPT)

    @device_function
    def kept_row(row: Any, start: Any, channel: Any, states: Any) -> Any:
        """Four inputs before row 0, which is at position `start`, as two packed pairs."""
        known = start + row >= int64(0)
        place = divide(start + row, ring)[1] if known else int64(0)
        return _kept_pairs(states + (place * int64(channels) + channel) * int64(2), known)

    @device_function
    def keep_last(x: Any, states: Any, start: Any, after: Any, channel: Any, words: Any) -> None:
        """Store the inputs that a state after so many rows needs; of the three before row 0, those at positions."""
        row = after - int64(KEPT)
        while row < after:
            if start + row >= int64(0):
                low, high = words[4], words[5]
                if row >= int64(0):
                    low, high = _pairs_of_four(x + (row * int64(width) + channel) * int64(4))
                elif row == int64(-3):
                    low, high = words[0], words[1]
                elif row == int64(-2):
                    low, high = words[2], words[3]
                place = divide(start + row, ring)[1]
                ptx.store_global_64(states + (place * int64(channels) + channel) * int64(2), low, high)
            row += int64(1)

    @device_function
    def load_rows(words: Any, x: Any, first: Any, count: Any) -> None:
        """The packed pairs of a run's rows and of those before it; before row 0 it, after the last row that again."""
        loaded = cuda.local.array(num_loaded, uint32)
        for row in range(KEPT):
            place, at = max(int32(first + int32(row - KEPT)), int32(0)), 4 * row
            words_of_four = ptx.load_global_128(x + int64(place) * int64(4 * width))
            loaded[at], loaded[at + 1], loaded[at + 2], loaded[at + 3] = words_of_four
        for row in range(RUN):
            place, at = min(int32(first + int32(row)), int32(count - int32(1))), 4 * (row + KEPT)
            words_of_four = ptx.load_global_128(x + int64(place) * int64(4 * width))
            loaded[at], loaded[at + 1], loaded[at + 2], loaded[at + 3] = words_of_four
        for pair in range(num_words):
            low, high = ptx.float_of_bits(loaded[2 * pair]), ptx.float_of_bits(loaded[2 * pair + 1])
            words[pair] = ptx.bf16_pair(low, high)

    def prefill_delta_conv_kernel(
        x: Any, taps: Any, slots: Any, origin: Any, snapshots: Any, conv_state: Any, out: Any, count: Any
    ) -> None:
        lane, warp = int32(cuda.threadIdx.x) & int32(31), int32(cuda.threadIdx.x) >> int32(5)
        channel = int64(cuda.blockIdx.x) * int64(WARP_CHANNELS) + int64(lane) * int64(FOUR)
        first = int32(int32(int32(cuda.blockIdx.y) * int32(WARPS) + warp) * int32(RUN))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if channel >= int64(channels) or first >= int32(count):
            return
        words = cuda.local.array(num_words, uint32)
        load_rows(words, x + channel * int64(4), first, int32(count))
        u0, u1, v0, v1 = ptx.load_global_nc_128(taps + channel * int64(2 * TAPS))
        w0, w1, y0, y1 = ptx.load_global_nc_128(taps + channel * int64(2 * TAPS) + int64(16))
        live = int32(ptx.load_global_i32(origin + int64(4)))
        if first == int32(0) and live > int32(0):
            slot, start = int_at(slots, int64(0)), int_at(origin, int64(0))
            begin = slot
            if pairs >= 0:
                begin = int_at(snapshots, int64(0))
                begin = slot if begin < int64(0) else begin
            states = conv_state + begin * int64(ring * channels * 2)
            words[0], words[1] = kept_row(int64(-3), start, channel, states)
            words[2], words[3] = kept_row(int64(-2), start, channel, states)
            words[4], words[5] = kept_row(int64(-1), start, channel, states)
            for pair in range(pairs):
                at, after = int_at(snapshots, int64(2 * pair + 1)), int_at(snapshots, int64(2 * pair + 2))
                if at >= int64(0):
                    kept = conv_state + at * int64(ring * channels * 2)
                    keep_last(x, kept, start, after, channel, words)
            kept = conv_state + slot * int64(ring * channels * 2)
            keep_last(x, kept, start, int64(live), channel, words)
        target = out + (int64(first) * int64(channels) + channel) * int64(2)
        for turn in range(RUN):
            row = int32(first + int32(turn))
            a, b, c, d = words[2 * turn], words[2 * turn + 2], words[2 * turn + 4], words[2 * turn + 6]
            low = convolved_pair(a, b, c, d, (u0, u1), (v0, v1))
            a, b, c, d = words[2 * turn + 1], words[2 * turn + 3], words[2 * turn + 5], words[2 * turn + 7]
            high = convolved_pair(a, b, c, d, (w0, w1), (y0, y1))
            low, high = low if row < live else uint32(0), high if row < live else uint32(0)
            if row < int32(count):
                ptx.store_global_64(target + int64(2 * turn * channels), low, high)

    name = f"prefill_gated_delta_conv_{width}_{channels}_{ring}" + (f"_kept{pairs}" if pairs >= 0 else "")
    return Kernel(name, prefill_delta_conv_kernel, (types.int64,) * 8, THREADS, waits_before_trigger=True)


def _sizes(given: Given) -> tuple[int, int, int]:
    """Columns of x, channels, and the ring's places. Raises ShapeError."""
    width, channels, ring = given.sizes("W", "C", "I")
    check_taps(given["weight"], channels)
    check_dtype(torch.bfloat16, out=given["out"])
    if channels % FOUR or width % FOUR or width < channels:
        raise ShapeError(f"x must have a multiple of {FOUR} columns, and {channels} or more of them, got {width}")
    return width, channels, ring


@launches(reference.delta_conv)
def delta_conv(given: Given) -> list[KernelCall]:
    """`delta_conv` of the reference; the weight, the ring and out are bf16.

    One launch. Raises ShapeError for other dtypes, rows that are no whole slots', and a ring of too few places.
    """
    (width, channels, ring), (batch, count) = _sizes(given), given.sizes("B", "M")
    rows = count // batch
    if ring < rows + KEPT or rows * batch != count:
        raise ShapeError(f"conv_state must have {rows + KEPT} places a slot for {count} rows of {batch}, got {ring}")
    grid = (batch, -(-channels // (FOUR * THREADS)), 1)
    arguments = given.take("x", "weight", "slots", "dense_lens", "row_live", "conv_state", "out")
    return [KernelCall(_make(width, channels, ring, rows), grid, (*arguments, rows))]


@launches(reference.prefill_delta_conv)
def prefill_delta_conv(given: Given) -> list[KernelCall]:
    """`prefill_delta_conv` of the reference; dtypes as `delta_conv`.

    One launch. Time: 6 bytes a number of out over the memory's bandwidth. Raises ShapeError as `delta_conv` does.
    """
    (width, channels, ring), (rows,) = _sizes(given), given.sizes("c")
    kernel = _make_prefill(width, channels, ring, snapshot_pairs(given.arrays.get("snapshots")))
    grid = (-(-channels // WARP_CHANNELS), -(-rows // (RUN * WARPS)), 1)
    arguments = given.take("x", "weight", "slot", "chunk", "snapshots", "conv_state", "out")
    return [KernelCall(kernel, grid, (*arguments, rows))]


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: 35B-A3B's channels, a step's rows and a chunk's."""
    return [_make(12288, 8192, 11, 4), _make_prefill(12288, 8192, 11, -1), _make_prefill(12288, 8192, 11, 2)]
