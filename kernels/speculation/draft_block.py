"""This module lays out the rows of draft models that draft all positions in one pass, and may embed and norm them.

A block has a row. Rows are whole multiples of 16 bytes, of any dtype if nothing is normed.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import (
    byte_at,
    copy_row,
    divide,
    int_at,
    set_byte,
    set_int,
    threads_for,
    wide_count,
    zero_row,
)
from lowlat.kernels.common.norm_math import THREADS as NORM_THREADS
from lowlat.kernels.common.norm_math import WARPS as NORM_WARPS
from lowlat.kernels.common.norm_row import load_first, make_norm_functions, store_row, table_row, weights_label
from lowlat.kernels.elementwise.embed import check_table
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_width
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation import draft_block as reference
from lowlat.kernels.speculation.draft_rows import block_end
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, fit, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types

__all__ = [
    "BlockBoundary",
    "block_input",
    "block_rows",
    "examples",
    "mask_input",
    "mask_rows",
]

MASK_THREADS = 64


@launches(reference.block_rows)
def block_rows(given: Given) -> list[KernelCall]:
    """`block_rows` of the reference. Raises ShapeError for rows that do not hold all that may be live."""
    accepted, count, drafting = _block_sizes(given)
    kernel = _make_rows(accepted, count, drafting, wide_count("hidden", given["hidden"]))
    grid = (given["tokens"].shape[0] * count, 1, 1)
    return [KernelCall(kernel, grid, (*given.tensors, given.params["mask_token"]))]


def _block_sizes(given: Given) -> tuple[int, int, int]:
    """Rows a slot that may be committed, of the block, and that draft. Raises ShapeError where they do not fit."""
    accepted, count, drafting = given.sizes("T", "R", "S")
    if not 1 <= drafting <= count <= accepted + drafting - 1:
        raise ShapeError(
            f"block_rows: {count} rows a slot do not hold up to {accepted} committed ones with {drafting} that draft"
        )
    wide_count("mask_state", given["mask_state"])
    return accepted, count, drafting


def _make_row_of(accepted: int, drafting: int) -> tuple[Any, Any]:
    """Functions of a row of a block: its token, -1 where it is dead; and what is noted of it, and of a row that drafts,
    for which the first S rows of a slot do so."""

    @device_function
    def token_of(tokens: Any, mask_token: Any, owner: Any, row: Any, committed: Any, live: Any) -> Any:
        token = int64(-1)
        if live:
            token = int_at(tokens, owner * accepted + row) if row < committed else int64(mask_token)
        return token

    @device_function
    def note(
        place: Any, owner: Any, row: Any, token: Any, live: Any, going: Any, committed: Any, position: Any,
        block_tokens: Any, block_live: Any, block_positions: Any, drafting_live: Any, drafting_positions: Any,
    ) -> None:  # fmt: skip
        set_int(block_tokens, place, token)
        set_byte(block_live, place, 1 if live else 0)
        set_int(block_positions, place, position + row if live else int64(0))
        if row < drafting:
            at = owner * drafting + row
            set_byte(drafting_live, at, 1 if going else 0)
            set_int(drafting_positions, at, position + committed - 1 + row if going else int64(0))

    return token_of, note


@cache
def _make_rows(accepted: int, count: int, drafting: int, width: int) -> Kernel:
    """Grid (B * R,)."""
    threads, (token_of, note) = threads_for(width), _make_row_of(accepted, drafting)

    def kernel(
        tokens: Any,
        hidden: Any,
        commit_lens: Any,
        draft_live: Any,
        dense_lens: Any,
        mask_state: Any,
        out: Any,
        block_tokens: Any,
        block_live: Any,
        block_positions: Any,
        drafting_live: Any,
        drafting_positions: Any,
        mask_token: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        owner, row = divide(place, count)
        committed, going = int_at(commit_lens, owner), byte_at(draft_live, owner) != 0
        live = going and row < committed + (drafting - 1)
        target = out + place * (width * 16)
        if live:
            source = mask_state
            if row < committed:
                source = hidden + (owner * accepted + row) * (width * 16)
            copy_row(thread, threads, width, source, target)
        else:
            zero_row(thread, threads, width, target)
        if thread == 0:
            note(
                place, owner, row, token_of(tokens, mask_token, owner, row, committed, live), live, going, committed,
                int_at(dense_lens, owner), block_tokens, block_live, block_positions, drafting_live, drafting_positions,
            )  # fmt: skip

    return Kernel(
        f"block_rows_{accepted}_{count}_{drafting}_{width}",
        kernel,
        (types.int64,) * 13,
        threads,
        waits_before_trigger=True,
    )


@dataclass(frozen=True)
class BlockBoundary:
    """The operands of the reference's `store_boundary` next to the features of the committed rows."""

    positions: torch.Tensor
    row_live: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    block_features: torch.Tensor
    block_size: int


def block_input(
    *,
    weight: torch.Tensor | PackedMatrix,
    embed_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    block_hidden: torch.Tensor,
    out: torch.Tensor,
    normed_hidden: torch.Tensor,
    eps: float,
    boundary: BlockBoundary | None = None,
    **rows: Any,
) -> list[KernelCall]:
    """`block_rows`, then `embed` of its tokens and `concat_norms`, in one launch; with a boundary `store_boundary` too.

    rows          the other arguments of `block_rows`
    block_hidden  `out` of `block_rows`; `out` and normed_hidden are those of `concat_norms`
    weight        [V, N]  bf16, row-major or packed
    The others as these operations have them. Raises ShapeError for shapes that do not fit, and for a boundary of more
    committed rows than the block has.
    """
    given = fit(reference.block_rows, {**rows, "out": block_hidden})
    (accepted, count, drafting), (batch, width) = _block_sizes(given), given.sizes("B", "H")
    check_width(width)
    check_shape("out", out, batch * count, 2 * width)
    check_shape("normed_hidden", normed_hidden, batch * count, width)
    for norm_weight in (embed_weight, hidden_weight):
        check_shape("embed_weight and hidden_weight", norm_weight, width)
    check_dtype(torch.bfloat16, hidden=given["hidden"], out=out, normed_hidden=normed_hidden)
    table, tiled = check_table(weight, width)
    block_size, kept = 0, list[Argument]([0] * 6)
    if boundary is not None:
        block_size, (_, table_width) = boundary.block_size, boundary.block_table.shape
        for name, array in (("positions", boundary.positions), ("row_live", boundary.row_live)):
            check_shape(name, array, batch, accepted)
        check_shape("slots", boundary.slots, batch)
        check_shape("block_features", boundary.block_features, boundary.block_features.shape[0], width)
        if accepted > count or block_size < 1:
            raise ShapeError(f"block_input: {accepted} committed rows in a block of {count}, in pages of {block_size}")
        kept = [boundary.positions, boundary.row_live, boundary.block_table, table_width, boundary.slots]
        kept.append(boundary.block_features)
    kernel = _make_input(
        width, tiled, (accepted, count, drafting), block_size, eps, are_wide(embed_weight, hidden_weight)
    )
    reads, writes, mask_token = given.tensors[:6], given.tensors[6:], given.params["mask_token"]
    arguments = (*reads, table, embed_weight, hidden_weight, *writes, out, normed_hidden, mask_token, *kept)
    return [KernelCall(kernel, (batch * count, 2, 1), arguments)]


@cache
def _make_input(
    width: int, tiled: bool, sizes: tuple[int, int, int], block_size: int, eps: float, wide: bool = False
) -> Kernel:
    """Grid (B * R, 2): a token's embedding, and its feature or the mask's state. block_size 0: no boundary is kept."""
    accepted, count, drafting = sizes
    functions = make_norm_functions(wide)
    load_first_weights, finish_norm = functions.load_first, functions.finish
    token_of, note = _make_row_of(accepted, drafting)

    def block_input(
        tokens: Any, hidden: Any, commit_lens: Any, draft_live: Any, dense_lens: Any, mask_state: Any, table: Any,
        embed_weight: Any, hidden_weight: Any, block_hidden: Any, block_tokens: Any, block_live: Any,
        block_positions: Any, drafting_live: Any, drafting_positions: Any, out: Any, normed_hidden: Any,
        mask_token: Any, positions: Any, row_live: Any, block_table: Any, table_width: Any, slots: Any,
        block_features: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(shape=NORM_WARPS, dtype=float32)
        place, half = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        weight = hidden_weight if half == int64(1) else embed_weight
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner, row = divide(place, count)
        committed, going = int_at(commit_lens, owner), byte_at(draft_live, owner) != 0
        live, known = going and row < committed + (drafting - 1), row < committed
        offset, feature = place * int64(2 * width), hidden + (owner * accepted + row) * int64(2 * width)
        source, copy = feature if known else mask_state, normed_hidden + offset
        if half == int64(0):
            token = token_of(tokens, mask_token, owner, row, committed, live)
            source, copy = table_row(table, max(int32(token), int32(0)), width, tiled), int64(0)
            if cuda.threadIdx.x == 0:
                note(
                    place, owner, row, token, live, going, committed, int_at(dense_lens, owner), block_tokens,
                    block_live, block_positions, drafting_live, drafting_positions,
                )  # fmt: skip
        packed = tiled and half == int64(0)
        words = load_first(source, width, packed)
        if half == int64(1):
            ends, end = False, int64(0)
            if block_size > 0 and row < accepted:
                at = owner * accepted + row
                kept = byte_at(row_live, at) != 0
                ends, end = block_end(kept, at, owner, positions, block_table, table_width, slots, block_size)
            store_row(words, source, False, block_hidden + offset, live, width)
            if ends:
                target = block_features + end * int64(2 * width)
                store_row(load_first(feature, width, False), feature, False, target, True, width)
        target = out + (int64(2) * place + half) * int64(2 * width)
        finish_norm(words, weights, source, packed, weight, target, copy, live, sums, width, eps)

    stored = f"_block{block_size}" if block_size else ""
    name = f"block_input_n{width}_{'packed' if tiled else 'rows'}_{accepted}_{count}_{drafting}{stored}_eps{eps!r}"
    name += weights_label(wide)
    return Kernel(name, block_input, (types.int64,) * 24, NORM_THREADS, waits_before_trigger=True)


@launches(reference.mask_rows)
def mask_rows(given: Given) -> list[KernelCall]:
    """`mask_rows` of the reference. Raises ShapeError for too many rows of a block."""
    batch, accepted, count = given.sizes("B", "T", "R")
    if not 1 <= count <= MASK_THREADS:
        raise ShapeError(f"mask_rows: a block has 1 to {MASK_THREADS} rows, got {count}")
    arguments = (*given.tensors, given.params["mask_token"])
    return [KernelCall(_make_mask_rows(accepted, count), (batch, 1, 1), arguments)]


def _make_masked(accepted: int) -> tuple[Any, Any]:
    """Functions of a row of a block of masks after the last known token: its token, and what is noted of it."""

    @device_function
    def token_of(accepted_tokens: Any, commit_lens: Any, mask_token: Any, owner: Any, row: Any, going: Any) -> Any:
        token = int64(mask_token)
        if row == 0:
            token = int_at(accepted_tokens, owner * accepted + max(int_at(commit_lens, owner) - 1, int64(0)))
        return token if going else int64(-1)

    @device_function
    def note(
        place: Any, owner: Any, row: Any, token: Any, going: Any, start: Any, tokens: Any, positions: Any,
        row_live: Any, write_lens: Any,
    ) -> None:  # fmt: skip
        set_int(tokens, place, token)
        set_int(positions, place, start + row if going else int64(0))
        set_byte(row_live, place, 1 if going else 0)
        if row == 0:
            set_int(write_lens, owner, start if going else int64(0))

    return token_of, note


@cache
def _make_mask_rows(accepted: int, count: int) -> Kernel:
    """A block of threads a slot, a thread a row: grid (B,)."""
    token_of, note = _make_masked(accepted)

    def kernel(
        accepted_tokens: Any,
        commit_lens: Any,
        draft_live: Any,
        draft_lens: Any,
        tokens: Any,
        positions: Any,
        row_live: Any,
        write_lens: Any,
        mask_token: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner, row = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        going = byte_at(draft_live, owner) != 0
        if row < count:
            token = token_of(accepted_tokens, commit_lens, mask_token, owner, row, going)
            start, place = int_at(draft_lens, owner) - 1, owner * count + row
            note(place, owner, row, token, going, start, tokens, positions, row_live, write_lens)

    return Kernel(f"mask_rows_{accepted}_{count}", kernel, (types.int64,) * 9, MASK_THREADS, waits_before_trigger=True)


def mask_input(
    *,
    weight: torch.Tensor | PackedMatrix,
    norm_weight: torch.Tensor,
    out: torch.Tensor,
    normed: torch.Tensor,
    eps: float,
    **rows: Any,
) -> list[KernelCall]:
    """`mask_rows` of the reference, whose arguments `rows` are, then `embed_norm` of them; dead ones are zero in both.

    One launch. Raises ShapeError as these do.
    """
    given, width = fit(reference.mask_rows, rows), out.shape[1]
    batch, accepted, count = given.sizes("B", "T", "R")
    check_width(width)
    for name, array in (("out", out), ("normed", normed)):
        check_shape(name, array, batch * count, width)
    check_shape("norm_weight", norm_weight, width)
    check_dtype(torch.bfloat16, out=out, normed=normed)
    table, tiled = check_table(weight, width)
    kernel = _make_mask_input(width, tiled, accepted, count, eps, are_wide(norm_weight))
    reads, writes = given.tensors[:4], given.tensors[4:]
    arguments = (*reads, table, norm_weight, *writes, out, normed, given.params["mask_token"])
    return [KernelCall(kernel, (batch * count, 1, 1), arguments)]


@cache
def _make_mask_input(width: int, tiled: bool, accepted: int, count: int, eps: float, wide: bool = False) -> Kernel:
    """A block a row: grid (B * R,). wide: the norm's weight is float32."""
    functions = make_norm_functions(wide)
    load_first_weights, finish_norm = functions.load_first, functions.finish
    token_of, note = _make_masked(accepted)

    def mask_input(
        accepted_tokens: Any, commit_lens: Any, draft_live: Any, draft_lens: Any, table: Any, weight: Any, tokens: Any,
        positions: Any, row_live: Any, write_lens: Any, out: Any, normed: Any, mask_token: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(shape=NORM_WARPS, dtype=float32)
        place = int64(cuda.blockIdx.x)
        owner, row = divide(place, count)
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        going = byte_at(draft_live, owner) != 0
        token = token_of(accepted_tokens, commit_lens, mask_token, owner, row, going)
        if cuda.threadIdx.x == 0:
            start = int_at(draft_lens, owner) - 1
            note(place, owner, row, token, going, start, tokens, positions, row_live, write_lens)
        known = token >= 0
        source = table_row(table, max(int32(token), int32(0)), width, tiled)
        words = load_first(source, width, tiled)
        offset = place * int64(width * 2)
        store_row(words, source, tiled, out + offset, known, width)
        finish_norm(words, weights, source, tiled, weight, normed + offset, int64(0), known, sums, width, eps)

    name = f"mask_input_n{width}_{'packed' if tiled else 'rows'}_{accepted}_{count}_eps{eps!r}{weights_label(wide)}"
    return Kernel(name, mask_input, (types.int64,) * 13, NORM_THREADS, waits_before_trigger=True)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [
        _make_rows(4, 6, 3, 512),
        _make_input(4096, False, (8, 14, 7), 32, 1e-5),
        _make_input(2880, True, (4, 6, 3), 0, 1e-5),
        _make_input(8192, False, (4, 6, 3), 16, 1e-5),
        _make_mask_rows(4, 4),
        _make_mask_input(4096, False, 8, 8, 1e-5),
        _make_mask_input(2880, True, 4, 3, 1e-5),
    ]
