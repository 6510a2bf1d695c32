"""This module makes the EAGLE3 draft model's attention input in one launch: normed embedding, then normed hidden state.

Two blocks have a row. The left half is the token's embedding. The right half is the hidden state: the fc's output, or
in deeper levels of the tree the state that the parent's row feeds back. A chain's deeper level takes its tokens from
the best pairs of the level above, without a launch in between.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import divide
from lowlat.kernels.common.norm_math import THREADS, WARPS
from lowlat.kernels.common.norm_row import (
    is_live,
    load_first,
    make_norm_functions,
    store_row,
    table_row,
    weights_label,
)
from lowlat.kernels.elementwise.embed import check_table
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_width
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.reference.elementwise import elementwise as reference
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation.draft_rows import gather_level
from lowlat.kernels.sampling.argmax import drafted_token
from lowlat.kernels.speculation.draft_rows import block_end
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, fit, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["ChainDrafts", "concat_norms", "draft_input", "draft_level_input", "examples"]


@dataclass(frozen=True)
class ChainDrafts:
    """The drafts of the level above, one a slot, each the only parent of this level: what `draft_topk` takes, k = 1.

    best      [B, P, 2]    int32  what the logits' GEMM left
    row_live  [B] or [..]  uint8  B entries; None: all live
    names     [V]          int32  what to write in place of an index
    out       [B]          int32  out: the drafted tokens; -1 in a dead row and in one that is broken
    """

    best: torch.Tensor
    row_live: torch.Tensor | None
    names: torch.Tensor
    out: torch.Tensor


@cache
def _make_concat_norms(width: int, eps: float, wide: bool = False) -> Kernel:
    """Grid (M, 2). wide: weights of norms are float32."""
    functions = make_norm_functions(wide)
    load_first_weights, finish_norm = functions.load_first, functions.finish

    def concat_norms(
        embedded: Any, hidden: Any, embed_weight: Any, hidden_weight: Any, row_live: Any, out: Any, normed_hidden: Any
    ) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row, half = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        offset = row * int64(width * 2)
        weight, source, copy = embed_weight, embedded + offset, int64(0)
        if half == int64(1):
            weight, source, copy = hidden_weight, hidden + offset, normed_hidden + offset
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        words = load_first(source, width, False)
        live = is_live(row_live, row)
        target = out + (int64(2) * row + half) * int64(width * 2)
        finish_norm(words, weights, source, False, weight, target, copy, live, sums, width, eps)

    name = f"concat_norms_n{width}_eps{eps!r}{weights_label(wide)}"
    return Kernel(name, concat_norms, (types.int64,) * 7, THREADS, waits_before_trigger=True)


@cache
def _make_draft_input(width: int, tiled: bool, rows: int, block_size: int, eps: float, wide: bool = False) -> Kernel:
    """Grid (M, 2). `rows` and `block_size` are 0 where no boundary is kept."""
    functions = make_norm_functions(wide)
    load_first_weights, finish_norm = functions.load_first, functions.finish

    def draft_input(
        tokens: Any,
        table: Any,
        hidden: Any,
        embed_weight: Any,
        hidden_weight: Any,
        row_live: Any,
        out: Any,
        normed_hidden: Any,
        positions: Any,
        block_table: Any,
        table_width: Any,
        slots: Any,
        block_features: Any,
    ) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row, half = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        weight = hidden_weight if half == int64(1) else embed_weight
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        offset = row * int64(width * 2)
        source, copy, known = hidden + offset, normed_hidden + offset, True
        if half == int64(0):
            token = int32(ptx.load_global_i32(tokens + row * int64(4)))
            known = token >= int32(0)
            source, copy = table_row(table, max(token, int32(0)), width, tiled), int64(0)
        packed = tiled and half == int64(0)
        words = load_first(source, width, packed)
        live = is_live(row_live, row)
        if block_size > 0 and half == int64(1):
            owner, _ = divide(row, rows)
            ends, end = block_end(live, row, owner, positions, block_table, table_width, slots, block_size)
            if ends:
                store_row(words, source, False, block_features + end * int64(width * 2), True, width)
        target = out + (int64(2) * row + half) * int64(width * 2)
        shown = live and known
        finish_norm(words, weights, source, packed, weight, target, copy, shown, sums, width, eps)

    stored = f"_rows{rows}_block{block_size}" if block_size else ""
    name = f"draft_input_n{width}_{'packed' if tiled else 'rows'}{stored}_eps{eps!r}{weights_label(wide)}"
    return Kernel(name, draft_input, (types.int64,) * 13, THREADS, waits_before_trigger=True)


@cache
def _make_chosen(num_nodes: int, pairs: int) -> Any:
    """A device function: the token of a slot's node, from where it lies or, with `pairs` of its row, from these."""

    @device_function
    def chosen(draft_nodes: Any, owner: Any, node: Any, best: Any, best_live: Any, names: Any, drafted: Any) -> Any:
        place = draft_nodes + (owner * int64(num_nodes) + node) * int64(4)
        if pairs == 0:
            return int32(ptx.load_global_i32(place))
        token = drafted_token(best + owner * int64(8 * pairs), pairs, is_live(best_live, owner), names)
        if int64(cuda.blockIdx.y) == int64(0) and uint32(cuda.threadIdx.x) == uint32(0):
            ptx.store_global_i32(place, token)
            ptx.store_global_i32(drafted + owner * int64(4), token)
        return token

    return chosen


@cache
def _make_level_input(
    width: int, tiled: bool, level: tuple[int, int, int, int], eps: float, pairs: int = 0, wide_weights: bool = False
) -> Kernel:
    """Grid (B * W, 2); level is W, nodes a slot T, rows of the level above V, depth; pairs of a row of a chain's."""
    wide, num_nodes, above, depth = level
    functions = make_norm_functions(wide_weights)
    load_first_weights, finish_norm = functions.load_first, functions.finish
    chosen_of = _make_chosen(num_nodes, pairs)

    def draft_level_input(
        feedback: Any,
        draft_nodes: Any,
        draft_live: Any,
        draft_lens: Any,
        nodes: Any,
        parent_rows: Any,
        masks: Any,
        table: Any,
        embed_weight: Any,
        hidden_weight: Any,
        hidden: Any,
        tokens: Any,
        row_live: Any,
        positions: Any,
        row_masks: Any,
        out: Any,
        normed_hidden: Any,
        best: Any,
        best_live: Any,
        names: Any,
        drafted: Any,
    ) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row, half = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        owner = int64(uint32(row) // uint32(wide))
        place = row - owner * int64(wide)
        weight = hidden_weight if half == int64(1) else embed_weight
        weights = load_first_weights(weight, width)
        node = int64(ptx.load_global_i32(nodes + place * int64(4)))
        parent = int64(ptx.load_global_i32(parent_rows + place * int64(4)))
        mask = ptx.load_global_i64(masks + place * int64(8))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        chosen = chosen_of(draft_nodes, owner, node, best, best_live, names, drafted)
        live = is_live(draft_live, owner) and chosen >= int32(0)
        offset = row * int64(width * 2)
        source = feedback + (owner * int64(above) + parent) * int64(width * 2)
        copy = normed_hidden + offset
        if half == int64(0):
            source, copy = table_row(table, max(chosen, int32(0)), width, tiled), int64(0)
        packed = tiled and half == int64(0)
        words = load_first(source, width, packed)
        if half == int64(1):
            store_row(words, source, False, hidden + offset, True, width)
        elif uint32(cuda.threadIdx.x) == uint32(0):
            length = int32(ptx.load_global_i32(draft_lens + owner * int64(4)))
            ptx.store_global_i32(tokens + row * int64(4), chosen if live else int32(-1))
            ptx.store_global_i32(positions + row * int64(4), int32(length + int32(depth - 2)) if live else int32(0))
            row_masks[owner, place] = mask if live else int64(0)
            row_live[owner, place] = 1 if live else 0
        target = out + (int64(2) * row + half) * int64(width * 2)
        finish_norm(words, weights, source, packed, weight, target, copy, live, sums, width, eps)

    shape = f"w{wide}_t{num_nodes}_v{above}_d{depth}"
    name = f"draft_level_input_n{width}_{shape}_{'packed' if tiled else 'rows'}_eps{eps!r}"
    name = (f"{name}_pairs{pairs}" if pairs else name) + weights_label(wide_weights)
    address = types.int64
    flags, words = types.Array(types.uint8, 2, "C"), types.Array(types.int64, 2, "C")
    signature = (*(address,) * 12, flags, address, words, *(address,) * 6)
    return Kernel(name, draft_level_input, signature, THREADS, waits_before_trigger=True)


def _check_halves(
    embed_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    hidden: torch.Tensor,
    out: torch.Tensor,
    normed_hidden: torch.Tensor,
) -> tuple[int, int, bool]:
    """The rows and the width, all shapes agreeing, and whether weights of norms are float32."""
    rows, width = hidden.shape
    check_width(width)
    check_shape("embed_weight", embed_weight, width)
    check_shape("hidden_weight", hidden_weight, width)
    check_shape("out", out, rows, 2 * width)
    check_shape("normed_hidden", normed_hidden, rows, width)
    check_dtype(
        torch.bfloat16,
        hidden=hidden,
        out=out,
        normed_hidden=normed_hidden,
    )
    return rows, width, are_wide(embed_weight, hidden_weight)


@launches(reference.concat_norms)
def concat_norms(given: Given) -> list[KernelCall]:
    """Normed embedding next to normed hidden state, of bf16; dead rows give zero. One launch.

    Raises ShapeError for N outside of ROW_WIDTH, and weights of two dtypes.
    """
    names = ("embed_weight", "hidden_weight", "hidden", "out", "normed_hidden")
    rows, width, wide_weights = _check_halves(*(given[name] for name in names))
    arguments = given.take("embedded", "hidden", "embed_weight", "hidden_weight", "row_live", "out", "normed_hidden")
    return [KernelCall(_make_concat_norms(width, given.params["eps"], wide_weights), (rows, 2, 1), arguments)]


def draft_input(
    tokens: torch.Tensor,
    weight: torch.Tensor | PackedMatrix,
    hidden: torch.Tensor,
    embed_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    normed_hidden: torch.Tensor,
    block_features: torch.Tensor | None = None,
    block_size: int = 0,
    eps: float,
) -> list[KernelCall]:
    """`embed` and `concat_norms` of the same rows; with block_features `store_boundary` too.

    tokens          [B, T] or [M]  int32; -1 is dead
    weight          [V, N]         bf16, row-major or packed
    hidden          [M, N]         bf16
    positions       [B, T]         int32  with block_features, as block_table [max B, ..] and slots [B] int32
    block_features  [P, N]         bf16   updated
    The others as for `concat_norms`. One launch. Raises ShapeError as `concat_norms` does, and for a boundary
    without its positions, table, slots, flags and block size.
    """
    rows, width, wide_weights = _check_halves(embed_weight, hidden_weight, hidden, out, normed_hidden)
    check_row_live(row_live, rows)
    if tokens.numel() != rows:
        raise ShapeError(f"tokens must have {rows} entries, got shape {list(tokens.shape)}")
    table, tiled = check_table(weight, width)
    check_dtype(torch.int32, tokens=tokens, positions=positions, block_table=block_table, slots=slots)
    check_dtype(torch.bfloat16, block_features=block_features)
    live: Argument = 0 if row_live is None else row_live
    boundary: tuple[Argument, ...] = (0, 0, 0, 0, 0)
    kernel = _make_draft_input(width, tiled, 0, 0, eps, wide_weights)
    if block_features is not None:
        if positions is None or block_table is None or slots is None or row_live is None or block_size < 1:
            raise ShapeError("block_features needs positions, block_table, slots, row_live and block_size")
        per_slot = rows // slots.numel()
        check_shape("positions", positions, slots.numel(), per_slot)
        check_shape("hidden", hidden, slots.numel() * per_slot, width)
        check_shape("block_features", block_features, block_features.shape[0], width)
        boundary = (positions, block_table, block_table.shape[1], slots, block_features)
        kernel = _make_draft_input(width, tiled, per_slot, block_size, eps, wide_weights)
    arguments = (tokens, table, hidden, embed_weight, hidden_weight, live, out, normed_hidden, *boundary)
    return [KernelCall(kernel, (rows, 2, 1), arguments)]


def draft_level_input(
    *,
    weight: torch.Tensor | PackedMatrix,
    embed_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    out: torch.Tensor,
    normed_hidden: torch.Tensor,
    eps: float,
    drafts: ChainDrafts | None = None,
    **level: Any,
) -> list[KernelCall]:
    """`gather_level`, then `embed` of its tokens and `concat_norms`; before them the drafts that it gathers, if given.

    level               the arguments of `gather_level`; nodes, parent_rows and masks are constants, read before the
                        kernel waits; draft_nodes is updated with `drafts`: node nodes[0] of every slot
    weight              [V, N]                    bf16, row-major or packed
    out, normed_hidden  [B * W, 2N], [B * W, N]   bf16  out
    drafts              with V = W = 1
    One launch. Raises ShapeError as `concat_norms` does, and for drafts of a level that is no chain's.
    """
    given = fit(gather_level, level)
    batch, wide, num_nodes, above = given.sizes("B", "W", "T", "V")
    rows, width, wide_weights = _check_halves(embed_weight, hidden_weight, given["hidden"], out, normed_hidden)
    table, tiled = check_table(weight, width)
    pairs, own = _drafts(drafts, batch, (wide, above))
    kernel = _make_level_input(width, tiled, (wide, num_nodes, above, given.params["depth"]), eps, pairs, wide_weights)
    reads, writes = given.tensors[:7], given.tensors[7:]
    arguments = (*reads, table, embed_weight, hidden_weight, *writes, out, normed_hidden, *own)
    return [KernelCall(kernel, (rows, 2, 1), arguments)]


def _drafts(drafts: ChainDrafts | None, batch: int, level: tuple[int, int]) -> tuple[int, tuple[Argument, ...]]:
    """The pairs of a row, 0 without drafts, and the arguments of these. Raises ShapeError."""
    if drafts is None:
        return 0, (0,) * 4
    if level != (1, 1):
        raise ShapeError(f"drafts are of a chain, a row a slot in each level; got {level[0]} below {level[1]}")
    pairs = drafts.best.shape[1]
    check_shape("best", drafts.best, batch, pairs, 2)
    check_shape("the drafts' out", drafts.out, batch)
    check_dtype(torch.int32, best=drafts.best, names=drafts.names, out=drafts.out)
    check_row_live(drafts.row_live, batch)
    return pairs, (drafts.best, 0 if drafts.row_live is None else drafts.row_live, drafts.names, drafts.out)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make_concat_norms(4096, 1e-5),
        _make_draft_input(4096, False, 0, 0, 1e-5),
        _make_draft_input(2880, True, 4, 32, 1e-5),
        _make_draft_input(8192, False, 8, 16, 1e-5),
        _make_level_input(4096, False, (1, 4, 1, 1), 1e-5),
        _make_level_input(2880, True, (6, 48, 8, 3), 1e-5),
        _make_level_input(8192, True, (3, 16, 1, 1), 1e-5),
        _make_level_input(4096, False, (1, 4, 1, 1), 1e-5, 132),
        _make_concat_norms(2048, 1e-6, True),
        _make_draft_input(5120, True, 0, 0, 1e-6, True),
        _make_level_input(5120, True, (1, 4, 1, 1), 1e-6, 132, True),
    ]
