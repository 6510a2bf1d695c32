"""This module copies rows between the target and the draft model: features, slots' last rows, features at block ends.

Each is one launch, with a block for each row. Rows are whole multiples of 16 bytes.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, copy_row, divide, int_at, threads_for, wide_count, zero_row
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation import draft_rows as reference
from lowlat.kernels.speculation.limits import GATHERED, MAX_GATHERED, MAX_SOURCES
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32

__all__ = [
    "block_end",
    "draft_prefill_rows",
    "examples",
    "gather_features",
    "join_features",
    "store_boundary",
    "take_block",
    "take_blocks",
    "take_last",
    "take_last_row",
]

PAIRS = 2
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def gather_features(accepted_nodes: torch.Tensor, *, out: torch.Tensor, **sources: torch.Tensor) -> list[KernelCall]:
    """Features of the accepted rows in order, the captured residual streams side by side.

    accepted_nodes  [B, T]          int32  -1 pads
    source0..       [B * T, Ht]            eight at most
    out             [B * T, F * Ht]        out; zero for pads
    Raises ShapeError for shapes that do not fit.
    """
    batch, rows = accepted_nodes.shape
    return _gathered(batch * rows, rows, accepted_nodes, out, sources)


def join_features(*, out: torch.Tensor, **sources: torch.Tensor) -> list[KernelCall]:
    """A chunk's captured residual streams side by side: source0.. [c, Ht], eight at most -> out [c, F * Ht] out.

    Raises ShapeError for shapes that do not fit.
    """
    return _gathered(out.shape[0], 0, 0, out, sources)


def _gathered(
    count: int, rows: int, nodes: Argument, out: torch.Tensor, sources: dict[str, torch.Tensor]
) -> list[KernelCall]:
    given = [sources[f"source{number}"] for number in range(len(sources))]
    GATHERED.check("sources of features", len(given))
    for source in given:
        check_shape("source", source, count, given[0].shape[1])
    check_shape("out", out, count, len(given) * given[0].shape[1])
    few = len(given) <= MAX_SOURCES
    make, most = (_make_gather, MAX_SOURCES) if few else (_make_gather_many, MAX_GATHERED)
    kernel = make(rows, len(given), wide_count("source0", given[0]))
    padded: list[Argument] = [*given, *[0] * (most - len(given))]
    return [KernelCall(kernel, (count, len(given), 1), (nodes, *padded, out))]


@cache
def _make_gather(rows: int, num_sources: int, width: int) -> Kernel:
    """Grid (M, F). rows: of a slot, by whose nodes rows are taken; 0: every row is its own."""
    threads = threads_for(width)

    def kernel(nodes: Any, source0: Any, source1: Any, source2: Any, source3: Any, source4: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, number = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        thread, origin = int64(cuda.threadIdx.x), row
        if rows > 0:
            node = int_at(nodes, row)
            origin = divide(row, rows)[0] * rows + node if node >= 0 else int64(-1)
        source = source0
        if number == 1:
            source = source1
        elif number == 2:
            source = source2
        elif number == 3:
            source = source3
        elif number == 4:
            source = source4
        target = out + (row * num_sources + number) * (width * 16)
        if origin >= 0:
            copy_row(thread, threads, width, source + origin * (width * 16), target)
        else:
            zero_row(thread, threads, width, target)

    name = f"gather_features_{rows}_{num_sources}_{width}" if rows else f"join_features_{num_sources}_{width}"
    return Kernel(name, kernel, (types.int64,) * 7, threads)


@cache
def _make_gather_many(rows: int, num_sources: int, width: int) -> Kernel:
    """The same of more sources than most draft models read."""
    threads = threads_for(width)

    def kernel(nodes: Any, s0: Any, s1: Any, s2: Any, s3: Any, s4: Any, s5: Any, s6: Any, s7: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, number = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        thread, origin = int64(cuda.threadIdx.x), row
        if rows > 0:
            node = int_at(nodes, row)
            origin = divide(row, rows)[0] * rows + node if node >= 0 else int64(-1)
        low = s0 if number == 0 else s1 if number == 1 else s2 if number == 2 else s3
        high = s4 if number == 4 else s5 if number == 5 else s6 if number == 6 else s7
        source = low if number < 4 else high
        target = out + (row * num_sources + number) * (width * 16)
        if origin >= 0:
            copy_row(thread, threads, width, source + origin * (width * 16), target)
        else:
            zero_row(thread, threads, width, target)

    name = f"gather_features_{rows}_{num_sources}_{width}" if rows else f"join_features_{num_sources}_{width}"
    return Kernel(name, kernel, (types.int64,) * 10, threads)


def take_last_row(x: torch.Tensor, commit_lens: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """`take_last` of the reference, whose arguments these are: of one tensor."""
    return take_last([(x, out)], commit_lens)


def take_last(pairs: Pairs, commit_lens: torch.Tensor) -> list[KernelCall]:
    """Row commit_lens - 1 of each slot, of one or two tensors at once.

    pairs        (x [B * T, W], out [B, W] out; zero where nothing was committed), of any widths
    commit_lens  [B]  int32
    Raises ShapeError for shapes that do not fit.
    """
    return _taken("take_last", pairs, commit_lens, 1)


def take_block(x: torch.Tensor, commit_lens: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """`take_block` of the reference, whose arguments these are: of one tensor."""
    return take_blocks([(x, out)], commit_lens)


def take_blocks(pairs: Pairs, commit_lens: torch.Tensor) -> list[KernelCall]:
    """Rows commit_lens - 1 to commit_lens + S - 2 of each slot, of one or two tensors at once.

    pairs        (x [B * R, W], out [B * S, W] out; zero where nothing was committed), of any widths
    commit_lens  [B]  int32
    Raises ShapeError for shapes that do not fit.
    """
    return _taken("take_block", pairs, commit_lens, None)


def _taken(name: str, pairs: Pairs, commit_lens: torch.Tensor, taken: int | None) -> list[KernelCall]:
    """So many rows of each slot, from the last committed one on; None: as many as the results have."""
    batch = commit_lens.shape[0]
    if not 1 <= len(pairs) <= PAIRS:
        raise ShapeError(f"{name} takes 1 or {PAIRS} pairs, got {len(pairs)}")
    if not batch:
        raise ShapeError(f"{name}: commit_lens must be of one slot or more, got shape {list(commit_lens.shape)}")
    rows = pairs[0][0].shape[0] // batch
    taken = pairs[0][1].shape[0] // batch if taken is None else taken
    for x, out in pairs:
        check_shape("x", x, batch * rows, out.shape[1])
        check_shape("out", out, batch * taken, out.shape[1])
    if not 1 <= taken <= rows:
        raise ShapeError(f"{name}: {taken} rows of {rows} cannot be taken")
    both = [pairs[0], pairs[-1]]
    kernel = _make_take(taken, *(wide_count("x", x) for x, _ in both))
    return [KernelCall(kernel, (batch * taken, len(pairs), 1), (*both[0], *both[1], commit_lens, rows))]


@cache
def _make_take(taken: int, first: int, second: int) -> Kernel:
    """Grid (B * S, pairs)."""
    threads = threads_for(max(first, second))

    def kernel(x0: Any, out0: Any, x1: Any, out1: Any, commit_lens: Any, rows: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        owner, number = divide(place, taken)
        last = int_at(commit_lens, owner) - 1
        x, out, count = x0, out0, int64(first)
        if cuda.blockIdx.y > 0:
            x, out, count = x1, out1, int64(second)
        target = out + place * count * 16
        if last >= 0:
            row = min(last + number, rows - 1)
            copy_row(thread, threads, count, x + (owner * rows + row) * count * 16, target)
        else:
            zero_row(thread, threads, count, target)

    kind = "take_last" if taken == 1 else f"take_block_{taken}"
    return Kernel(f"{kind}_{first}_{second}", kernel, (types.int64,) * 6, threads, waits_before_trigger=True)


@device_function
def block_end(
    live: Any, row: Any, owner: Any, positions: Any, block_table: Any, table_width: Any, slots: Any, block_size: Any
) -> Any:
    """Whether a live row is at the last position of a KV block, and that block's number, 0 where it is not.

    block_features has a row a KV block, by the block's number: the feature of the block's last position.

    live   a live row has a slot, -1 in slots has none; dead rows read their position alone
    row    index in positions
    owner  index in slots
    """
    block, position = int64(0), uint32(int_at(positions, row))
    ends = live and position % uint32(block_size) == uint32(block_size - 1)
    if ends:
        block = int_at(block_table, int_at(slots, owner) * table_width + int64(position // uint32(block_size)))
    return ends, block


@launches(reference.store_boundary)
def store_boundary(given: Given) -> list[KernelCall]:
    """Keep the feature of each block's last position, as the reference's `store_boundary`."""
    batch, rows, table_width, block_size = given.sizes("B", "T", "blocks", "block_size")
    kernel = _make_store(rows, wide_count("hidden", given["hidden"]), table_width, block_size)
    return [KernelCall(kernel, (batch * rows, 1, 1), given.tensors)]


@cache
def _make_store(rows: int, count: int, table_width: int, block: int) -> Kernel:
    threads = threads_for(count)

    def kernel(hidden: Any, positions: Any, row_live: Any, block_table: Any, slots: Any, block_features: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        owner, _ = divide(row, rows)
        live = byte_at(row_live, row) != 0
        ends, end = block_end(live, row, owner, positions, block_table, table_width, slots, block)
        if ends:
            source, target = hidden + row * (count * 16), block_features + end * (count * 16)
            copy_row(int64(cuda.threadIdx.x), threads, count, source, target)

    name = f"store_boundary_{rows}_{count}_{table_width}_{block}"
    return Kernel(name, kernel, (types.int64,) * 6, threads)


@launches(reference.draft_prefill_rows)
def draft_prefill_rows(given: Given) -> list[KernelCall]:
    """Shift a chunk's features by one row and keep those of complete blocks, as the reference's `draft_prefill_rows`.

    Start and count are read on the device. `hidden` and `shifted` are apart.
    """
    rows, block_size = given.sizes("c", "block_size")
    return [KernelCall(_make_prefill(wide_count("hidden", given["hidden"]), block_size), (rows, 1, 1), given.tensors)]


@cache
def _make_prefill(count: int, block: int) -> Kernel:
    """A block a row, which makes the row after it, and keeps it if it ends a complete block of the KV cache."""
    threads = threads_for(count)

    def kernel(hidden: Any, chunk: Any, table: Any, block_features: Any, shifted: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        start, live = int_at(chunk, int64(0)), int_at(chunk, int64(1))
        source = hidden + row * (count * 16)
        if row + 1 < int64(cuda.gridDim.x):
            copy_row(thread, threads, count, source, shifted + (row + 1) * (count * 16))
        if row == 0:
            if start > 0:
                before = int_at(table, divide(start - 1, block)[0])
                copy_row(thread, threads, count, block_features + before * (count * 16), shifted)
            else:
                zero_row(thread, threads, count, shifted)
        if divide(row + 1, block)[1] == 0 and row < live:
            kept = int_at(table, divide(start + row, block)[0])
            copy_row(thread, threads, count, source, block_features + kept * (count * 16))

    return Kernel(f"draft_prefill_rows_{count}_{block}", kernel, (types.int64,) * 5, threads)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    gathers = [_make_gather(4, 3, 512), _make_gather(0, 3, 512), _make_gather_many(4, 6, 512)]
    return [
        *gathers,
        _make_take(1, 1024, 512),
        _make_take(3, 512, 512),
        _make_store(4, 512, 513, 32),
        _make_prefill(512, 32),
    ]
