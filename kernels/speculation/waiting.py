"""This module lays out the rows that wait for the draft model, and copies their features.

It has `waiting_rows`, `take_features` and `keep_features` of the reference, each in a launch, and the first two
together with the draft model's rows. Rows are whole multiples of 16 bytes.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import copy_row, divide, int_at, set_byte, set_int, threads_for, wide_count, zero_row
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation import waiting as reference
from lowlat.kernels.speculation.limits import GATHERED, MAX_GATHERED, MAX_SOURCES
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types

__all__ = [
    "KeepingPlan",
    "draft_waiting_rows",
    "examples",
    "keep_features",
    "keep_row",
    "keeping_plan",
    "take_features",
    "waiting_rows",
]

MAX_WAITING = 64
ARGUMENTS = (
    *("slots", "lengths", "tokens", "extended", "waiting_tokens", "counts", "firsts", "draft_live", "draft_lens"),
    *("waiting_features", "out"),
    *("row_tokens", "row_positions", "row_live", "write_lens", "live_positions"),
)


@dataclass(frozen=True)
class WaitingPlan:
    """The extents and operations that the kernel of waiting rows is specialised by; a block lays out a row.

    most       positions of a slot
    kept, wide of the features: positions kept, and 16 bytes of a row; 0: no features are taken
    lays_out   `draft_rows` is done, too
    """

    context: int
    most: int
    kept: int = 0
    wide: int = 0
    lays_out: bool = False


@launches(reference.waiting_rows)
def waiting_rows(given: Given) -> list[KernelCall]:
    """Lay out the waiting positions, as the reference's `waiting_rows`. Time: three trips to memory."""
    return _lay_out(given.arrays)


def draft_waiting_rows(
    *, features: Mapping[str, torch.Tensor] | None = None, rows: Mapping[str, torch.Tensor], **waiting: torch.Tensor
) -> list[KernelCall]:
    """`waiting_rows`, whose arguments these are, `take_features` and `draft_rows` over what it lays out, in one launch.

    features  the `waiting_features` and `out` of `take_features`; None: there are none
    rows      the outputs of `draft_rows` by name
    """
    renamed = {{"tokens": "row_tokens", "positions": "row_positions"}.get(name, name): rows[name] for name in rows}
    return _lay_out({**waiting, **(features or {}), **renamed})


def _lay_out(given: Mapping[str, torch.Tensor]) -> list[KernelCall]:
    """The launch for these arguments by the kernel's names."""
    batch, most = given["waiting_tokens"].shape
    max_batch, context = given["tokens"].shape
    if not 1 <= most <= MAX_WAITING:
        raise ShapeError(f"from 1 to {MAX_WAITING} positions of a slot may wait for the draft model, got {most}")
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("slots", "counts", "firsts", "draft_live", "draft_lens", "write_lens"), (batch,)),
        **dict.fromkeys(("lengths", "extended"), (max_batch,)),
        **dict.fromkeys(("row_tokens", "row_positions", "row_live"), (batch, most)),
        "live_positions": (batch, 1),
    }
    for name, tensor in given.items():
        if name in shapes:
            check_shape(name, tensor, *shapes[name])
    plan = WaitingPlan(context, most, lays_out="row_tokens" in given)
    if "out" in given:
        _, kept, width = given["waiting_features"].shape
        check_shape("out", given["out"], batch * most, width)
        plan = replace(plan, kept=kept, wide=wide_count("out", given["out"]))
        _check_taken(most, kept)
    return [KernelCall(_make_rows(plan), (batch * most, 1, 1), tuple(given.get(name, 0) for name in ARGUMENTS))]


def _check_taken(rows: int, kept: int) -> None:
    if rows > kept:
        raise ShapeError(f"{rows} rows of a slot are taken of {kept} that are kept")


@device_function
def _set_draft_row(index: Any, row: Any, place: Any, found: Any, token: Any, outs: Any) -> None:
    """A row of the draft model over a waiting position, and its slot's part where it is the first."""
    slot, first, count = found
    row_tokens, row_positions, row_live, write_lens, live_positions = outs
    live = slot >= 0 and place < count
    set_int(row_tokens, row, token)
    set_int(row_positions, row, first + place if live else int64(0))
    set_byte(row_live, row, int64(1) if live else int64(0))
    if place == 0:
        set_int(write_lens, index, first + 1 if slot >= 0 else int64(0))
        set_int(live_positions, index, first + count - 1 if slot >= 0 else int64(0))


@device_function
def _take_row(
    thread: Any, threads: Any, sizes: Any, row: Any, place: Any, found: Any, waiting_features: Any, out: Any
) -> None:
    """The features of a waiting position, by a block; zeros where nothing waits at that place.

    sizes  positions of a slot that are kept, and 16 bytes of a row
    found  the slot, its first position that waits, and how many do
    """
    kept, wide = sizes
    slot, first, count = found
    target = out + row * (wide * 16)
    if slot >= 0 and place < count:
        _, at = divide(first + place, kept)
        copy_row(thread, threads, wide, waiting_features + (slot * kept + at) * (wide * 16), target)
    else:
        zero_row(thread, threads, wide, target)


@cache
def _make_rows(plan: WaitingPlan) -> Kernel:
    context, most, kept, wide, lays_out = astuple(plan)
    takes, threads = wide > 0, threads_for(wide) if wide else 32

    def kernel(
        slots: Any,
        lengths: Any,
        tokens: Any,
        extended: Any,
        waiting_tokens: Any,
        counts: Any,
        firsts: Any,
        draft_live: Any,
        draft_lens: Any,
        waiting_features: Any,
        out: Any,
        row_tokens: Any,
        row_positions: Any,
        row_live: Any,
        write_lens: Any,
        live_positions: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        index, place = divide(row, most)
        slot, length, first, count, token = int_at(slots, index), int64(0), int64(0), int64(0), int64(-1)
        if slot >= 0:
            length = int_at(lengths, slot)
            first = max(int_at(extended, slot), length - 1 - most, int64(0))
            count = length - 1 - first
        if thread == 0:
            if place < count:
                token = int_at(tokens, slot * context + first + 1 + place)
            set_int(waiting_tokens, row, token)
            if place == 0:
                set_int(counts, index, count)
                set_int(firsts, index, first)
                set_byte(draft_live, index, int64(1) if slot >= 0 else int64(0))
                set_int(draft_lens, index, length)
            if lays_out:
                outs = (row_tokens, row_positions, row_live, write_lens, live_positions)
                _set_draft_row(index, row, place, (slot, first, count), token, outs)
        if takes:
            found = (slot, first, count)
            _take_row(thread, threads, (kept, wide), row, place, found, waiting_features, out)

    name = "waiting_rows_" + "_".join(map(str, astuple(plan)))
    return Kernel(name, kernel, (types.int64,) * len(ARGUMENTS), threads)


@launches(reference.take_features)
def take_features(given: Given) -> list[KernelCall]:
    """Features of the waiting positions, as the reference's `take_features`, a block a row.

    Raises ShapeError for more rows than are kept.
    """
    batch, rows, most = given.sizes("B", "R", "N")
    _check_taken(rows, most)
    return [KernelCall(_make_take(rows, most, wide_count("out", given["out"])), (batch * rows, 1, 1), given.tensors)]


@cache
def _make_take(rows: int, most: int, width: int) -> Kernel:
    threads = threads_for(width)

    def kernel(waiting_features: Any, slots: Any, firsts: Any, counts: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        index, place = divide(row, rows)
        found = (int_at(slots, index), int_at(firsts, index), int_at(counts, index))
        _take_row(thread, threads, (most, width), row, place, found, waiting_features, out)

    return Kernel(f"take_features_{rows}_{most}_{width}", kernel, (types.int64,) * 5, threads)


@dataclass(frozen=True)
class KeepingPlan:
    """The extents that keeping features is specialised by; a block keeps a row of a source.

    kept  positions of a slot that are kept
    wide  16 bytes of a row of a source; 0: nothing is kept
    """

    batch: int = 0
    rows: int = 0
    kept: int = 0
    sources: int = 0
    wide: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that keep features."""
        return self.batch * self.rows * self.sources


def keeping_plan(given: Given) -> KeepingPlan:
    """The plan for these arguments of `keep_features`. Raises ShapeError for more sources or rows than are kept."""
    batch, rows, kept, sources = given.sizes("B", "T", "N", "F")
    GATHERED.check("sources of features", sources)
    if rows > kept:
        raise ShapeError(f"{kept} kept features do not hold {rows} rows")
    return KeepingPlan(batch, rows, kept, sources, wide_count("source0", given["source0"]))


@launches(reference.keep_features)
def keep_features(given: Given) -> list[KernelCall]:
    """Keep the features of the committed positions, as the reference's `keep_features`.

    A block for each row and source, of which there are eight at most. Raises ShapeError as `keeping_plan` does.
    """
    plan = keeping_plan(given)
    make, most = (_make_keep, MAX_SOURCES) if plan.sources <= MAX_SOURCES else (_make_keep_many, MAX_GATHERED)
    names = ("accepted_nodes", "commit_lens", "dense_lens", "slots", *(f"source{n}" for n in range(most)))
    return [KernelCall(make(plan), (plan.num_blocks, 1, 1), given.take(*names, "waiting_features"))]


@device_function
def keep_row(
    block: Any, thread: Any, threads: Any, sizes: Any, heads: Any, sources: Any, waiting_features: Any
) -> None:
    """Keep a row of a source, by a block.

    sizes  of the plan, the batch left out
    """
    rows, kept, num_sources, wide = sizes
    nodes, commit_lens, dense_lens, slots = heads
    row, number = divide(block, num_sources)
    index, place = divide(row, rows)
    slot, count = int_at(slots, index), int_at(commit_lens, index)
    node, root = int_at(nodes, row), int_at(dense_lens, index)
    source = sources[0]
    if number == 1:
        source = sources[1]
    elif number == 2:
        source = sources[2]
    elif number == 3:
        source = sources[3]
    elif number == 4:
        source = sources[4]
    if slot >= 0 and place < count:
        _, at = divide(root + place, kept)
        target = waiting_features + ((slot * kept + at) * num_sources + number) * (wide * 16)
        copy_row(thread, threads, wide, source + (index * rows + node) * (wide * 16), target)


@cache
def _make_keep(plan: KeepingPlan) -> Kernel:
    sizes, threads = astuple(plan)[1:], threads_for(plan.wide)

    def kernel(
        nodes: Any,
        commit_lens: Any,
        dense_lens: Any,
        slots: Any,
        source0: Any,
        source1: Any,
        source2: Any,
        source3: Any,
        source4: Any,
        waiting_features: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        heads, sources = (nodes, commit_lens, dense_lens, slots), (source0, source1, source2, source3, source4)
        block, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        keep_row(block, thread, threads, sizes, heads, sources, waiting_features)

    name = "keep_features_" + "_".join(map(str, astuple(plan)[1:]))
    return Kernel(name, kernel, (types.int64,) * 10, threads)


@cache
def _make_keep_many(plan: KeepingPlan) -> Kernel:
    """The same of more sources than most draft models read."""
    sizes, threads = astuple(plan)[1:], threads_for(plan.wide)

    def kernel(
        nodes: Any,
        commit_lens: Any,
        dense_lens: Any,
        slots: Any,
        s0: Any,
        s1: Any,
        s2: Any,
        s3: Any,
        s4: Any,
        s5: Any,
        s6: Any,
        s7: Any,
        waiting_features: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        block, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        _, number = divide(block, sizes[2])
        low = s0 if number == 0 else s1 if number == 1 else s2 if number == 2 else s3
        high = s4 if number == 4 else s5 if number == 5 else s6 if number == 6 else s7
        source = low if number < 4 else high
        heads, sources = (nodes, commit_lens, dense_lens, slots), (source, source, source, source, source)
        keep_row(block, thread, threads, sizes, heads, sources, waiting_features)

    name = "keep_features_" + "_".join(map(str, astuple(plan)[1:]))
    return Kernel(name, kernel, (types.int64,) * 13, threads)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    together = WaitingPlan(8192, 8, 64, 1536, lays_out=True)
    rows = [_make_rows(plan) for plan in (together, WaitingPlan(8192, 8))]
    return [
        *rows,
        _make_take(8, 64, 1536),
        _make_keep(KeepingPlan(1, 4, 64, 3, 512)),
        _make_keep_many(KeepingPlan(1, 4, 64, 6, 512)),
    ]
