"""Attention of a step's rows over the paged cache, in one launch: split, computed and combined where it ends.

A grid of fixed size walks items (slot, key-value head, query rows, 256 positions), listed on the device. Each of a
block's four warps owns 16 of a tile's 64 positions and feeds itself through its own pipeline of copies, which runs on
across items; the block meets only at an item's end. The last block to finish combines. A row's bits depend on its own
positions alone: see `attention_tile` for how masked positions leave no trace, and `attention_merge` for the merges.
Tiles with positions of the tree run once for each of its rows, over the row's own ancestors in order; a chain's rows
share them. It knows nothing of requests, and of drafts only their masks.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.attention_copy import DESCRIPTOR_WORDS, LAST_STEP, NO_ITEM, make_copy_functions
from lowlat.kernels.attention_merge import GROUP_SHIFT, LOG2_E, TABLE_FLOATS, WARPS, make_ending
from lowlat.kernels.attention_plan import (
    CURSOR_FIELDS,
    ENTRY,
    ITEMS,
    PLAN_STRIDE,
    SPLIT,
    AttentionShape,
    enter_item,
    make_plan_functions,
)
from lowlat.kernels.attention_tile import make_attend, make_forget
from lowlat.kernels.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["attention", "attention_bytes", "examples"]

MAX_BATCH, MAX_TREE, MAX_ROWS = 16, 64, 512
PLAN_INTS = MAX_BATCH * PLAN_STRIDE
NORM_FLOATS = WARPS * 32
TILE_BYTES = {64: 16 * 1024, 128: 32 * 1024}  # keys and values of 64 positions
STAGES = {64: 4, 128: 3}
ALIGNMENT = 128  # of the stages: pieces of rows are permuted within 128 bytes


def attention(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    row_live: torch.Tensor,
    row_masks: torch.Tensor,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    scale: float,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
    workspace: Workspace,
    early_metadata: bool = False,
    num_blocks: int = 264,
    stages: int | None = None,
) -> list[KernelCall]:
    """Each row attends to its slot's dense prefix and to its own ancestors in the tree.

    q                 [B * R, H, D]        bf16; D 64 or 128
    k_cache, v_cache  [P, G, block, D]     bf16; block a power of two from 16 to 256
    block_table       [max B, C / block]   int32
    slots             [B]                  int32; -1 pads
    dense_lens        [B]                  int32  positions [first, dense) are everybody's
    row_live          [B * R]              uint8
    row_masks         [B, R]               int64  bit a: sees node a, stored at dense + a, itself included
    sinks             [H]                  float32 or None
    out               [B * R, H * D]       bf16, out; dead rows zero
    workspace         sums of splits, and counters
    early_metadata    slots, dense_lens, block_table and the dense prefix were written before the kernel before this one
    num_blocks        blocks of the grid; two fit on a multiprocessor
    stages            tiles of 64 positions under way in a block
    The window and `keep_first` mean what they mean in the reference. Time: `attention_bytes` over the bandwidth and
    some 4 us. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    batch, rows = row_masks.shape
    heads, head_dim = q.shape[1:]
    kv_heads, block = k_cache.shape[1:3]
    _check_sizes(batch, rows, heads, kv_heads, head_dim, block)
    check_shape("q", q, batch * rows, heads, head_dim)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_shape(name, tensor, k_cache.shape[0], kv_heads, block, head_dim)
    check_shape("slots", slots, batch)
    check_shape("dense_lens", dense_lens, batch)
    check_shape("row_live", row_live.reshape(-1), batch * rows)
    check_shape("out", out, batch * rows, heads * head_dim)
    if sinks is not None:
        check_shape("sinks", sinks, heads)
    _check_dtypes(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    group = heads // kv_heads
    row_tiles = 2 if head_dim == 64 and rows * group > 16 else 1
    shape = AttentionShape(
        head_dim, group, kv_heads, block, first, window, keep_first if window is not None else 0, row_tiles,
        stages or STAGES[head_dim], sinks is not None, early_metadata,
    )  # fmt: skip
    splits, groups = _capacity(shape, rows, block_table.shape[1] * block)
    tiles = -(-rows * group // (16 * row_tiles))
    owners = batch * kv_heads * tiles
    parked = owners * row_tiles * (splits + groups) * min(16, rows * group)
    partials = workspace(f"attention.partials.{parked}x{head_dim}", (parked, head_dim), torch.float32)
    sums = workspace(f"attention.sums.{parked}", (parked, 2), torch.float32)
    counters = workspace(f"attention.counters.{owners}x{groups}", (owners, groups + 1), torch.int32)
    tensors = (q, k_cache, v_cache, block_table, slots, dense_lens, row_live, row_masks, 0 if sinks is None else sinks)
    scalars = (batch, rows, block_table.shape[1], splits, groups, scale * LOG2_E)
    arguments = (*tensors, out, partials, sums, counters, *scalars)
    return [KernelCall(_make(shape), (num_blocks, 1, 1), arguments)]


def attention_bytes(
    dense_lens: list[int], *, kv_heads: int, head_dim: int, first: int = 0, window: int | None = None, keep_first: int = 0
) -> int:
    """Bytes of keys and values that a launch must read, in bf16, for slots of these lengths; drafts are neglected."""
    total = 0
    for dense in dense_lens:
        low = first if window is None else max(first, dense - window)
        kept = 0 if window is None else max(0, min(low - first, keep_first))
        total += max(0, dense - low) + kept
    return total * kv_heads * head_dim * 4


def examples() -> list[Kernel]:
    """Representative specialisations: Llama, gpt-oss with and without a window, a head with a window."""
    return [
        _make(AttentionShape(128, 4, 8, 32, 0, None, 0, 1, 3, False, True)),
        _make(AttentionShape(64, 8, 8, 32, 0, None, 0, 2, 4, True, True)),
        _make(AttentionShape(64, 8, 8, 32, 0, 128, 0, 1, 4, True, True)),
        _make(AttentionShape(128, 3, 2, 16, 1, 512, 4, 1, 3, False, False)),
    ]


def _check_sizes(batch: int, rows: int, heads: int, kv_heads: int, head_dim: int, block: int) -> None:
    limits = (
        (head_dim in STAGES, f"the head size must be 64 or 128, got {head_dim}"),
        (block in (16, 32, 64, 128, 256), f"the cache's block must be a power of two from 16 to 256, got {block}"),
        (heads % kv_heads == 0, f"{heads} query heads do not divide among {kv_heads} key-value heads"),
        (kv_heads <= 1024, f"at most 1024 key-value heads, got {kv_heads}"),
        (1 <= rows <= MAX_TREE, f"1 to {MAX_TREE} rows a slot, got {rows}"),
        (1 <= batch <= MAX_BATCH, f"1 to {MAX_BATCH} slots, got {batch}"),
        (batch * rows <= MAX_ROWS, f"at most {MAX_ROWS} rows in all, got {batch * rows}"),
        (rows * heads // kv_heads <= 16 * 256, f"too many query heads of one key-value head: {heads // kv_heads}"),
    )
    for fits, problem in limits:
        if not fits:
            raise ShapeError(f"attention: {problem}")


def _check_dtypes(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise ShapeError(f"attention: {name} must be bfloat16, got {tensor.dtype}")


def _capacity(shape: AttentionShape, rows: int, positions: int) -> tuple[int, int]:
    """The most splits and groups of splits that a slot can have."""
    splits = -(-positions // SPLIT)
    groups = -(-splits // (1 << GROUP_SHIFT))
    if shape.window is not None:
        kept = -(-(shape.first + shape.keep_first) // SPLIT)
        splits = min(splits, kept + -(-(shape.window + rows) // SPLIT) + 1)
    return splits, min(splits, groups)


@cache
def _make(shape: AttentionShape) -> Kernel:
    pipeline = shape.stages * (TILE_BYTES[shape.head_dim] + WARPS * DESCRIPTOR_WORDS * 4)
    signature = (*(types.int64,) * 13, *(types.int32,) * 5, types.float32)
    min_blocks = 2 if shape.row_tiles == 2 else 3  # by registers, so that blocks of other kernels fit beside
    return Kernel(shape.name, _kernel(shape), signature, WARPS * 32, min_blocks, pipeline + ALIGNMENT)


def _kernel(shape: AttentionShape) -> Callable[..., None]:
    stages, early = shape.stages, shape.early
    stage_bytes = TILE_BYTES[shape.head_dim] // WARPS
    rings, ring_bytes = stages * WARPS * stage_bytes, stages * DESCRIPTOR_WORDS * 4
    num_totals, num_queries, halves = shape.row_tiles * shape.head_dim // 2, shape.row_tiles * shape.head_dim // 4, 2 * shape.row_tiles
    read_rows, plan_slots = make_plan_functions(shape)
    lane_offset, is_early, look_up, issue = make_copy_functions(shape)
    enter, attend, clear = enter_item(shape), make_attend(shape), _make_clear(shape)
    (merge, settle), forget = make_ending(shape), make_forget(shape)
    wait_for_copies = ptx.copies_wait(stages - 1)

    def attention(
        q: Any, k_cache: Any, v_cache: Any, table: Any, slots: Any, dense_lens: Any, row_live: Any, row_masks: Any,
        sinks: Any, out: Any, partials: Any, sums: Any, counters: Any, batch: Any, rows: Any, width: Any, splits: Any,
        groups: Any, scale: Any,
    ) -> None:  # fmt: skip
        plan, row_ends = cuda.shared.array(PLAN_INTS, int32), cuda.shared.array(MAX_ROWS, int32)
        shared_norms, parts = cuda.shared.array(NORM_FLOATS, float32), cuda.shared.array(TABLE_FLOATS, float32)
        flag, cursor = cuda.shared.array(1, int32), cuda.local.array(CURSOR_FIELDS, int32)
        totals, queries = cuda.local.array(num_totals, float32), cuda.local.array(num_queries, uint32)
        peaks, norms, ends = (
            cuda.local.array(halves, float32), cuda.local.array(halves, float32), cuda.local.array(halves, int32)
        )  # fmt: skip
        ptx.let_next_kernel_start()
        lane, warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
        base = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        base = uint32(base + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - (ALIGNMENT - 1))
        mine, ring = warp * uint32(stage_bytes), uint32(base + uint32(rings) + warp * uint32(ring_bytes))
        offset = lane_offset(lane)
        waited = not early
        if waited:
            ptx.wait_for_previous_kernel()
            read_rows(plan, row_ends, slots, dense_lens, row_live, row_masks, batch, rows)
        plan_slots(plan, slots, dense_lens, batch, rows)
        enter(cursor, plan, int32(cuda.blockIdx.x), batch, rows)
        look_up(cursor, plan, table, width, warp)
        forget(totals, queries, peaks, norms, ends)
        stage, filled = uint32(0), 0
        words = (uint32(0), uint32(0), uint32(0), uint32(0))
        while True:
            here, descriptor = uint32(base + stage * uint32(WARPS * stage_bytes)), uint32(ring + stage * uint32(16))
            full = filled >= stages
            if not waited and (full or cursor[ENTRY] < 0 or not is_early(cursor, plan, rows)):
                ptx.wait_for_previous_kernel()
                read_rows(plan, row_ends, slots, dense_lens, row_live, row_masks, batch, rows)
                waited = True
            ending = False
            if full:
                wait_for_copies()
                cuda.syncwarp()
                words = ptx.load_shared_128(descriptor)
                if words[0] == uint32(NO_ITEM):
                    break
                attend(
                    totals, queries, peaks, norms, ends, q, row_ends, plan, words, uint32(here + mine), rows, scale,
                    warp, lane,
                )  # fmt: skip
                cuda.syncwarp()
                ending = words[0] & uint32(LAST_STEP) != 0
                if ending:
                    merge(
                        totals, peaks, norms, plan, words, here, shared_norms, warp, lane, partials, sums, splits,
                        groups, rows, row_ends, sinks, out,
                    )  # fmt: skip
            else:
                filled += 1
            issue(
                cursor, plan, row_ends, uint32(here + mine + offset), descriptor, k_cache, v_cache, table, row_masks,
                batch, rows, width, warp, lane,
            )  # fmt: skip
            ptx.copies_commit()
            look_up(cursor, plan, table, width, warp)
            stage = uint32(stage + uint32(1)) if stage + 1 < stages else uint32(0)
            if ending:
                settle(
                    parts, flag, plan, words, counters, partials, sums, splits, groups, rows, row_ends, sinks, out
                )  # fmt: skip
                forget(totals, queries, peaks, norms, ends)
        clear(plan, out, batch, rows)

    return attention


def _make_clear(shape: AttentionShape) -> Callable[..., Any]:
    """Zero the results of slots without work; the grid shares it."""
    pieces = shape.group * shape.kv_heads * shape.head_dim // 8

    @device_function
    def clear(plan: Any, out: Any, batch: Any, rows: Any) -> None:
        for entry in range(batch):
            if plan[entry * PLAN_STRIDE + ITEMS] == 0:
                start = int64(entry) * int64(rows) * pieces
                piece = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)
                while piece < int64(rows) * pieces:
                    ptx.store_global_128(out + (start + piece) * 16, uint32(0), uint32(0), uint32(0), uint32(0))
                    piece += int64(cuda.gridDim.x) * int64(cuda.blockDim.x)

    return clear
