"""The causal convolution of a gated delta net, alone: a thread has four channels of four rows, one after another.

The thread that has the first rows of a slot or a chunk reads the inputs before them from the ring, and then writes what
later steps read there: no other thread comes to its channels of the ring.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, divide, int_at
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.recurrent.delta_math import convolved, four_numbers, rounded
from lowlat.kernels.recurrent.delta_rule import check_taps, snapshot_pairs
from lowlat.kernels.recurrent.limits import TAPS
from lowlat.kernels.reference.recurrent import delta_conv as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["delta_conv", "examples", "prefill_delta_conv"]

THREADS = 128
FOUR = 4  # channels of a thread
RUN = 4  # rows of a thread of prefill, not less than TAPS - 1
KEPT = TAPS - 1


@device_function
def _rounded_four(address: Any) -> Any:
    x = four_numbers(ptx.load_global_128(address))
    return rounded(x[0]), rounded(x[1]), rounded(x[2]), rounded(x[3])


@device_function
def _kept_four(address: Any, known: Any) -> Any:
    """Four inputs of the ring; zeros before position 0."""
    low, high = uint32(0), uint32(0)
    if known:
        low, high = ptx.load_global_64(address)
    return low_value(low), high_value(low), low_value(high), high_value(high)


@device_function
def _store_four(address: Any, x: Any) -> None:
    ptx.store_global_64(address, ptx.bf16_pair(x[0], x[1]), ptx.bf16_pair(x[2], x[3]))


@cache
def _make(width: int, channels: int, ring: int, rows: int, pairs: int = 0) -> Kernel:
    """Grid (B or runs of a chunk's rows, channels / (FOUR * THREADS)).

    rows   of a slot, live ones first, all of which a thread has; 0: a chunk's rows, of which it has RUN
    pairs  of a row of the states and a number of the chunk's positions; -1: no snapshots are given
    """
    run = rows if rows else RUN

    @device_function
    def input_four(x: Any, row: Any, start: Any, channel: Any, states: Any) -> Any:
        """Four inputs at a row of x, or before row 0: of the ring, whose row 0 is at position `start`."""
        if row >= int64(0):
            return _rounded_four(x + (row * int64(width) + channel) * int64(4))
        known = start + row >= int64(0)
        place = divide(start + row, ring)[1] if known else int64(0)
        return _kept_four(states + (place * int64(channels) + channel) * int64(2), known)

    @device_function
    def keep_last(
        x: Any, states: Any, start: Any, after: Any, channel: Any, before: Any, middle: Any, last: Any
    ) -> None:
        """Store the inputs that a state after so many rows needs; of the three before row 0, those at positions."""
        row = after - int64(KEPT)
        while row < after:
            if start + row >= int64(0):
                four = last
                if row >= int64(0):
                    four = _rounded_four(x + (row * int64(width) + channel) * int64(4))
                elif row == int64(-3):
                    four = before
                elif row == int64(-2):
                    four = middle
                place = divide(start + row, ring)[1]
                _store_four(states + (place * int64(channels) + channel) * int64(2), four)
            row += int64(1)

    def delta_conv_kernel(
        x: Any,
        taps: Any,
        slots: Any,
        origin: Any,
        row_live: Any,
        snapshots: Any,
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
        if rows > 0:
            slot, start, base, first, live = int_at(slots, owner), int64(0), owner * int64(rows), int64(0), int64(0)
            if slot >= int64(0):
                for row in range(rows):
                    live += int64(byte_at(row_live, base + int64(row)) != int64(0))
                start = int_at(origin, owner)
        else:
            slot, start, base, first = int_at(slots, int64(0)), int_at(origin, int64(0)), int64(0), owner * int64(RUN)
            live = int_at(origin, int64(1))
        begin = slot
        if pairs >= 0 and rows == 0:
            begin = int_at(snapshots, int64(0))
            begin = slot if begin < int64(0) else begin
        own = x + base * int64(4 * width)
        states = conv_state + begin * int64(ring * channels * 2)
        a = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
        b, c = a, a
        if first < live:
            a = input_four(own, first - int64(3), start, channel, states)
            b = input_four(own, first - int64(2), start, channel, states)
            c = input_four(own, first - int64(1), start, channel, states)
        before, middle, last = a, b, c
        for turn in range(run):
            row = first + int64(turn)
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
                if rows > 0:
                    place = divide(start + row, ring)[1]
                    _store_four(states + (place * int64(channels) + channel) * int64(2), d)
            elif row < count:
                ptx.store_global_64(target, uint32(0), uint32(0))
        if rows == 0 and first == int64(0) and live > int64(0):
            for pair in range(pairs):
                at, after = int_at(snapshots, int64(2 * pair + 1)), int_at(snapshots, int64(2 * pair + 2))
                if at >= int64(0):
                    kept = conv_state + at * int64(ring * channels * 2)
                    keep_last(own, kept, start, after, channel, before, middle, last)
            kept = conv_state + slot * int64(ring * channels * 2)
            keep_last(own, kept, start, live, channel, before, middle, last)

    kind = f"gated_delta_conv_{rows}" if rows else "prefill_gated_delta_conv"
    name = f"{kind}_{width}_{channels}_{ring}" + (f"_kept{pairs}" if pairs >= 0 and not rows else "")
    return Kernel(name, delta_conv_kernel, (types.int64,) * 9, THREADS, waits_before_trigger=True)


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
    arguments = (*given.take("x", "weight", "slots", "dense_lens", "row_live"), 0, given["conv_state"], given["out"])
    return [KernelCall(_make(width, channels, ring, rows), grid, (*arguments, rows))]


@launches(reference.prefill_delta_conv)
def prefill_delta_conv(given: Given) -> list[KernelCall]:
    """`prefill_delta_conv` of the reference; dtypes as `delta_conv`.

    One launch. Time: 6 bytes a number of out over the memory's bandwidth. Raises ShapeError as `delta_conv` does.
    """
    (width, channels, ring), (rows,) = _sizes(given), given.sizes("c")
    kernel = _make(width, channels, ring, 0, snapshot_pairs(given.arrays.get("snapshots")))
    grid = (-(-rows // RUN), -(-channels // (FOUR * THREADS)), 1)
    arguments = (*given.take("x", "weight", "slot", "chunk"), 0, *given.take("snapshots", "conv_state", "out"))
    return [KernelCall(kernel, grid, (*arguments, rows))]


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: 35B-A3B's channels, a step's rows and a chunk's."""
    return [_make(12288, 8192, 11, 4), _make(12288, 8192, 11, 0, -1), _make(12288, 8192, 11, 0, 2)]
