"""This module has the second launch of attention, which combines the splits' partial sums to the rows' results.

A block's threads take a row's splits in four classes, by the split's absolute number, so that loads of many splits are
in flight at once. A class adds its splits in order, and the classes are added in order. This structure is fixed by
absolute positions alone. A split in which a row sees nothing has factor 0, and a row with a single split has factor 1.
Neither changes a bit, so it does not matter which splits were processed for other rows.

It is a launch of its own, because fences and counters by which the last block could do it inside of the first launch
cost more than half of the whole on an H200 (4 slots at 16K: 152 us, 76 us without).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.attention.limits import MAX_SPLITS
from lowlat.kernels.attention.merge import join_sink
from lowlat.kernels.attention.plan import AttentionShape, make_count_splits, query_tiles_of
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["combine_splits", "examples"]

CLASSES = 4
LEAST_THREADS = 128
UNROLL = 8  # splits of a class whose loads are in flight together
MINUS_INFINITY = -math.inf
EVERY_LANE = 0xFFFFFFFF


def combine_splits(
    shape: AttentionShape,
    partials: torch.Tensor,
    sums: torch.Tensor,
    *,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    row_live: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    tail: int,
    capacity: int,
) -> KernelCall:
    """Combine the partial sums of the first launch.

    partials  [owners, capacity, parked, D]  float32  weighted values of each split
    sums      [owners, capacity, parked, 2]  float32  peak (times log2 e) and sum of weights
    An owner is (slot, key-value head, tile of 16 query rows); parked is 16, or all query rows if they are fewer.
    A slot's splits follow from its dense length and `tail`, as in the first launch.
    """
    count = out.numel() // shape.head_dim
    if capacity > MAX_SPLITS:
        limit = MAX_SPLITS * shape.split
        raise ShapeError(f"attention: a context of {capacity * shape.split} positions exceeds {limit}")
    shape = replace(  # nothing here depends on these
        shape,
        row_tiles=1,
        stages=1,
        blocks=0,
        coded=False,
        few=False,
        converts=True,
        late_rows=False,
        softcap=None,
        takes_turns=False,
        many=False,
    )
    rows_a_block = _threads_of(shape) // (CLASSES * shape.head_dim // 4)
    grid = -(-count // rows_a_block)
    tensors = (partials, sums, slots, dense_lens, row_live, 0 if sinks is None else sinks, out)
    return KernelCall(_make(shape), (grid, 1, 1), (*tensors, count, rows, tail, capacity))


@cache
def _make(shape: AttentionShape) -> Kernel:
    kinds = (*(types.int64,) * 7, *(types.int32,) * 4)
    return Kernel(shape.name.replace("attention", "attention_combine"), _kernel(shape), kinds, _threads_of(shape))


def _threads_of(shape: AttentionShape) -> int:
    """Threads of a block: of one row of the widest heads, or of several."""
    return max(LEAST_THREADS, CLASSES * shape.head_dim // 4)


def _kernel(shape: AttentionShape) -> Callable[..., None]:
    head_dim, heads = shape.head_dim, shape.group * shape.kv_heads
    lanes = head_dim // 4
    row_threads, threads = CLASSES * lanes, _threads_of(shape)
    rows_a_block, row_bytes, all_reduced = threads // row_threads, 4 * head_dim, 5 * threads
    locate, finish = _make_locate(shape), _make_finish(shape)
    early, has_sinks, count_splits = shape.early, shape.sinks, make_count_splits(shape)
    floats = rows_a_block * MAX_SPLITS

    def combine(
        partials: Any, sums: Any, slots: Any, dense_lens: Any, row_live: Any, sinks: Any, out: Any, count: Any,
        rows: Any, tail: Any, capacity: Any,
    ) -> None:  # fmt: skip
        factors, norms = cuda.shared.array(floats, float32), cuda.shared.array(floats, float32)
        exchanged = cuda.shared.array(all_reduced, float32)
        ptx.let_next_kernel_start()
        if not early:
            ptx.wait_for_previous_kernel()
        thread = int32(cuda.threadIdx.x)
        mine = int32(uint32(thread) // uint32(row_threads))
        inner = int32(thread - mine * row_threads)
        number = min(int32(int32(cuda.blockIdx.x) * rows_a_block + mine), int32(count - 1))
        row, head = int32(uint32(number) // uint32(heads)), int32(uint32(number) % uint32(heads))
        entry = int32(uint32(row) // uint32(rows))
        base, pitch = locate(row, head, rows, capacity)
        step, at, sink = pitch * row_bytes, mine * MAX_SPLITS, float32(0)
        if has_sinks:
            sink = ptx.load_global_f32(sinks + int64(head) * 4)
        dense = max(ptx.load_global_i32(dense_lens + int64(entry) * 4), int32(0))
        keep, start, splits = count_splits(dense, tail)
        parts = int32(keep + splits - start)
        if ptx.load_global_i32(slots + int64(entry) * 4) < 0:
            parts = int32(0)
        member, lane = int32(uint32(inner) // uint32(lanes)), int32(uint32(inner) % uint32(lanes))
        source, last = partials + base * row_bytes + int64(lane) * 16, max(int32(parts - 1), int32(0))
        split = int32(start + ((member - start) & (CLASSES - 1)))
        if early:
            ptx.wait_for_previous_kernel()
        live = ptx.load_global_u8(row_live + int64(row)) != uint32(0)
        live = live and parts > 0
        loaded = load_parts(source, step, int32(split + keep - start), last)  # in flight while factors are computed
        largest = float32(MINUS_INFINITY)
        for part in range(inner, parts, row_threads):
            peak = ptx.load_global_f32(sums + (base + int64(part) * pitch) * 8)
            factors[at + part] = peak
            norms[at + part] = ptx.load_global_f32(sums + (base + int64(part) * pitch) * 8 + 4)
            largest = max(largest, peak)
        for distance in (16, 8, 4, 2, 1):
            largest = max(largest, cuda.shfl_xor_sync(EVERY_LANE, largest, distance))
        if thread & 31 == 0:
            exchanged[thread >> 5] = largest
        cuda.syncthreads()
        for warp in range(row_threads // 32):
            largest = max(largest, exchanged[mine * (row_threads // 32) + warp])
        shift = float32(0) if largest == float32(MINUS_INFINITY) else -largest
        for part in range(inner, parts, row_threads):
            factors[at + part] = ptx.exp2_approx(ptx.add_rn(factors[at + part], shift))
        cuda.syncthreads()
        # split s is part s of those kept at the start, and part s - start + keep of the others: a class goes by s
        totals, kept = (float32(0), float32(0), float32(0), float32(0), float32(0)), member
        while kept < keep:
            first = load_parts(source, step, kept, int32(keep - 1))
            totals = add_parts(totals, first, factors, norms, at, kept, int32(keep - 1))
            kept = int32(kept + UNROLL * CLASSES)
        while split < splits and parts > 0:
            part = int32(split + keep - start)
            split = int32(split + UNROLL * CLASSES)
            following = load_parts(source, step, int32(part + UNROLL * CLASSES), last)
            totals = add_parts(totals, loaded, factors, norms, at, part, last)
            loaded = following
        a, b, c, d, norm = totals
        # whoever read the peaks that were exchanged has met all others since
        exchanged[thread], exchanged[threads + thread] = a, b
        exchanged[2 * threads + thread], exchanged[3 * threads + thread] = c, d
        exchanged[4 * threads + thread] = norm
        cuda.syncthreads()
        if member == 0 and int32(int32(cuda.blockIdx.x) * rows_a_block + mine) < count:
            finish(exchanged, thread, largest, live, number, lane, sink, out)

    return combine


@device_function
def add_parts(totals: Any, loaded: Any, factors: Any, norms: Any, at: Any, first: Any, last: Any) -> Any:
    """Add a class's next UNROLL parts to its sums, in order; a row's factors and norms are at `at`."""
    a, b, c, d, norm = totals
    part = int32(first)
    for words in loaded:
        factor = factors[at + part] if part <= last else float32(0)
        norm = ptx.fma_rn(norms[at + min(part, last)], factor, norm)
        a = ptx.fma_rn(ptx.float_of_bits(words[0]), factor, a)
        b = ptx.fma_rn(ptx.float_of_bits(words[1]), factor, b)
        c = ptx.fma_rn(ptx.float_of_bits(words[2]), factor, c)
        d = ptx.fma_rn(ptx.float_of_bits(words[3]), factor, d)
        part = int32(part + CLASSES)
    return a, b, c, d, norm


@device_function
def load_parts(source: Any, step: Any, first: Any, last: Any) -> Any:
    """Load the next UNROLL parts of a class, all in flight at once."""
    return (
        load_part(source, step, first, last, 0),
        load_part(source, step, first, last, 1),
        load_part(source, step, first, last, 2),
        load_part(source, step, first, last, 3),
        load_part(source, step, first, last, 4),
        load_part(source, step, first, last, 5),
        load_part(source, step, first, last, 6),
        load_part(source, step, first, last, 7),
    )


@device_function
def load_part(source: Any, step: Any, first: Any, last: Any, turn: Any) -> Any:
    """Load sixteen bytes of the part `turn` places ahead in its class; past the end the last part, with factor 0."""
    part = min(int32(first + turn * CLASSES), last)
    return ptx.load_global_128(source + int64(part) * step)


def _make_locate(shape: AttentionShape) -> Any:
    """A device function that returns the place of a query row's first part, in rows of the partial sums."""
    group, kv_heads = shape.group, shape.kv_heads

    @device_function
    def locate(row: Any, head: Any, rows: Any, capacity: Any) -> Any:
        entry = int32(uint32(row) // uint32(rows))
        kv_head = int32(uint32(head) // uint32(group))
        query = int32((row - entry * rows) * group + head - kv_head * group)
        tile, inside = query >> 4, query & 15
        owner, parked = int64((entry * kv_heads + kv_head) * query_tiles_of(rows, group) + tile), min(rows * group, 16)
        return owner * capacity * parked + int64(inside), int64(parked)

    return locate


def _make_finish(shape: AttentionShape) -> Any:
    """A device function that adds the classes in order and the sink, divides, and stores four columns of a row."""
    head_dim, has_sinks, threads = shape.head_dim, shape.sinks, _threads_of(shape)
    lanes = head_dim // 4

    @device_function
    def finish(
        exchanged: Any, thread: Any, largest: Any, live: Any, number: Any, lane: Any, sink: Any, out: Any
    ) -> None:
        totals = cuda.local.array(5, float32)
        for part in range(5):
            total = exchanged[part * threads + thread]
            for other in range(1, CLASSES):
                total = ptx.add_rn(total, exchanged[part * threads + thread + other * lanes])
            totals[part] = total
        factor, norm = float32(1), totals[4]
        if has_sinks:
            factor, norm = join_sink(largest, norm, sink)
        elif norm == float32(0):
            norm = float32(1)
        for part in range(4):  # adding 0 turns -0 into 0
            value = ptx.div_rn(ptx.mul_rn(ptx.add_rn(totals[part], float32(0)), factor), norm)
            totals[part] = value if live else float32(0)
        address = out + (int64(number) * head_dim + int64(lane) * 4) * 2
        ptx.store_global_64(address, ptx.bf16_pair(totals[0], totals[1]), ptx.bf16_pair(totals[2], totals[3]))

    return finish


def examples() -> list[Kernel]:
    """Representative specialisations."""
    return [
        _make(AttentionShape(128, 4, 8, 32, 0, None, 0, 1, 3, False, True)),
        _make(AttentionShape(64, 8, 8, 32, 0, None, 0, 1, 4, True, True)),
        _make(AttentionShape(256, 8, 2, 32, 0, None, 0, 1, 1, False, True)),
    ]
