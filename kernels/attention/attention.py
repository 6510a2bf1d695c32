"""Attention of a step's rows over the paged cache takes two launches.

The first computes each split of the positions, the second combines the splits. Short windows need no splits, and take
one launch.

A grid of fixed size walks work items (slot, key-value head, query rows, split), which are listed on the device. Each of
a block's four warps has 16 of a tile's 64 positions and its own pipeline of copies, which continues across items. The
block synchronises only at the end of an item, and stores the split's sums for `combine`. A row's bits depend only on
its own positions: `tile` explains why masked positions have no effect. Tiles with positions of a tree run once for each
of its rows, over the row's ancestors in order; a chain's rows share them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.attention.combine import combine_splits
from lowlat.kernels.attention.copies import make_is_early, make_issue, make_lane_offset, make_look_up
from lowlat.kernels.attention.launch_plan import (
    ALIGNMENT,
    TEAMS,
    AttentionPlan,
    AttentionWork,
    candidate_plans,
    choose_attention_plan,
    pipeline_bytes,
    takes_turns,
)
from lowlat.kernels.attention.limits import (
    BLOCK_SIZE,
    FEW_SLOTS,
    HEAD_DIM,
    KV_HEADS,
    MAX_ROWS,
    QUERY_ROWS,
    ROWS,
    ROWS_A_SLOT,
    SLOTS,
    query_rows,
)
from lowlat.kernels.attention.merge import LOG2_E, make_merge
from lowlat.kernels.attention.plan import (
    CURSOR_FIELDS,
    LAST_STEP,
    NO_ITEM,
    PLACE,
    PLAN_STRIDE,
    AttentionShape,
    enter_item,
    make_plan_functions,
    make_spread,
)
from lowlat.kernels.attention.tile import exchange_bytes, make_attend, make_forget, query_words
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall, Workspace, examples_for
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = [
    "attention",
    "attention_bytes",
    "examples",
    "partial_attention",
]

CONVERTS_CODES = (8, 9)  # GPUs from this capability on have an instruction that converts e4m3 to fp16


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
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor,
    scale: float,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
    workspace: Workspace,
    early_metadata: bool = False,
    early_rows: bool = True,
    tail: int | None = None,
    split: int = 256,
    softcap: float | None = None,
    gpu: Gpu = H200,
    plan: AttentionPlan | None = None,
    num_blocks: int | None = None,
    parts: int = 0,
) -> list[KernelCall]:
    """Compute attention of each row over its slot's dense prefix and the row's ancestors in the tree.

    q                 [B * R, H, D]        bf16; D 64, 128, 256 or 512
    k_cache, v_cache  [P, G, block, D]     bf16, or with kv_scales uint8; block a power of two from 16 to 256
    block_table       [max B, C / block]   int32; with `parts` above 0 lists, see `partial_attention`
    slots             [B]                  int32; -1 pads
    dense_lens        [B]                  int32  all rows of a slot attend to positions [first, dense)
    row_live          [B * R]              uint8
    row_masks         [B, R]               int64  bit a: the row attends to node a, stored at dense + a; its own bit is
                      set
    sinks             [H]                  float32 or None
    kv_scales         [2, G]               float32, if the caches hold e4m3 codes; else None
    out               [B * R, H * D]       bf16, out; dead rows zero
    workspace         for the sums of splits
    early_metadata    whether the kernel before this one writes nothing that this one reads, except q and the rows' own
                      keys and values; early_rows says the same of row_live and row_masks
    tail              the most ancestors that a row may have; None: R
    split             positions of a split, 128, 256 or 512: a row's bits depend on it; see `choose_split`
    softcap           c: scores s become c tanh(s / c), in a kernel of its own; None: they stay
    gpu, plan         the GPU, and the launch's plan; None: from the GPU's tuning table, or a derived plan
    num_blocks        blocks of the grid; None: the plan's number on every SM
    With a short window there is one launch and no workspace. The window and `keep_first` have the reference's meaning.
    Time: `attention_bytes` over the bandwidth and some 4 us. Captured: yes. Raises ShapeError.
    """
    (batch, rows), (heads, head_dim) = row_masks.shape, q.shape[1:]
    kv_heads, block = k_cache.shape[1:3]
    _check_sizes(batch, rows, heads, kv_heads, head_dim, block)
    check_shape("q", q, batch * rows, heads, head_dim)
    check_shape("v_cache", v_cache, *k_cache.shape)
    _check_slots(batch, rows, slots=slots, dense_lens=dense_lens, row_live=row_live.reshape(-1))
    check_shape("out", out, batch * rows, heads * head_dim)
    if sinks is not None:
        check_shape("sinks", sinks, heads)
    _check_dtypes(kv_scales, kv_heads, (("q", q), ("out", out)), (("k_cache", k_cache), ("v_cache", v_cache)))
    group, keep = heads // kv_heads, keep_first if window is not None else 0
    work = AttentionWork(batch, rows, group, kv_heads, head_dim, window, keep, split, kv_scales is not None)
    chosen, planned = (plan, None) if plan is not None else choose_attention_plan(work, gpu)
    shape = _shape_of(work, chosen, gpu, block, first, sinks is not None, early_metadata)
    shape = replace(shape, parts=parts, late_rows=early_metadata and not early_rows, softcap=softcap)
    grid = (chosen.blocks * gpu.num_multiprocessors if num_blocks is None else num_blocks, 1, 1)
    given = (q, k_cache, v_cache, block_table, slots, dense_lens, row_live, row_masks)
    numbers = (0 if kv_scales is None else kv_scales, batch, rows, tail or rows, block_table.shape[-1])
    if shape.whole:
        ends = (0 if sinks is None else sinks, out)
        return [KernelCall(_make(shape), grid, (*given, *ends, *numbers, 0, scale * LOG2_E), planned=planned)]
    splits = _capacity(shape, tail or rows, block_table.shape[-1] * (block // max(parts, 1)))
    count = batch * kv_heads * work.query_tiles * splits * min(16, rows * group)
    partials = workspace("attention.partials", (count, head_dim), torch.float32)
    sums = workspace("attention.sums", (count, 2), torch.float32)
    arguments = (*given, partials, sums, *numbers, splits, scale * LOG2_E)
    second_half = combine_splits(
        shape, partials, sums, slots=slots, dense_lens=dense_lens, row_live=row_live, sinks=sinks, out=out, rows=rows,
        tail=tail or rows, capacity=splits,
    )  # fmt: skip
    return [KernelCall(_make(shape), grid, arguments, planned=planned), second_half]


def partial_attention(
    *, block_lists: torch.Tensor, block: int, k_cache: torch.Tensor, **given: Any
) -> list[KernelCall]:
    """Compute the reference's `partial_attention`: attention over lists of blocks, one for each slot and head.

    block_lists  [max B, G, n]  int32: entry e is part e % parts of the cache's block e // parts
    block        positions of a part, a power of two from 16 on
    given        the other arguments of `attention`, except a window; dense_lens count positions of the lists
    If a list holds all of a slot's parts in order, its rows have the bits of `attention`. Raises ShapeError.
    """
    kv_heads, size = k_cache.shape[1:3]
    if block < 16 or size % block or block & (block - 1):
        raise ShapeError(f"parts must be powers of two from 16 on that divide the cache's block of {size}, got {block}")
    check_shape("block_lists", block_lists, block_lists.shape[0], kv_heads, block_lists.shape[-1])
    return attention(block_table=block_lists, k_cache=k_cache, parts=size // block, **given)


def _shape_of(
    work: AttentionWork, plan: AttentionPlan, gpu: Gpu, block: int, first: int, sinks: bool, early: bool
) -> AttentionShape:
    """The kernel's specialisation for a plan."""
    few = work.few and plan.row_tiles == 1
    teams, blocks = (TEAMS[work.head_dim], 0) if work.whole else (1, plan.blocks)  # few busy blocks have room anywhere
    return AttentionShape(
        work.head_dim, work.group, work.kv_heads, block, first, work.window, work.keep_first, plan.row_tiles,
        plan.stages, sinks, early, work.split, work.whole, teams, blocks, coded=work.coded, few=few,
        converts=gpu.capability >= CONVERTS_CODES, takes_turns=takes_turns(work, gpu), many=work.batch > FEW_SLOTS,
    )  # fmt: skip


def attention_bytes(
    dense_lens: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
    itemsize: int = 2,
) -> int:
    """Bytes of keys and values that a launch must read for slots of these lengths, by bytes of a number; drafts are
    neglected."""
    total = 0
    for dense in dense_lens:
        low = first if window is None else max(first, dense - window)
        kept = 0 if window is None else max(0, min(low - first, keep_first))
        total += max(0, dense - low) + kept
    return total * kv_heads * head_dim * 2 * itemsize


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Representative specialisations for a GPU: Llama, gpt-oss with and without a window, heads with windows, plans
    that only a table chooses, heads of 256 and 512, and a softcap."""
    llama, oss = AttentionWork(1, 4, 4, 8, 128, None, 0, 256), AttentionWork(1, 4, 8, 8, 64, None, 0, 256)
    short = AttentionWork(1, 1, 4, 2, 128, 100, 0, 256)
    cases = (
        (llama, 32, 0, False, True),
        (oss, 32, 0, True, True),
        (replace(oss, window=128), 32, 0, True, True),
        (short, 16, 1, False, False),
        (replace(short, group=3, window=512, keep_first=4), 16, 1, False, False),
    )
    shapes = [
        _shape_of(work, candidate_plans(work, gpu)[0], gpu, block, first, sinks, early)
        for work, block, first, sinks, early in examples_for(gpu, cases, 4)
    ]
    tuned = [(work, plan) for work in (replace(llama, rows=8), oss) for plan in candidate_plans(work, gpu)[1:3]]
    tuned.append((replace(oss, rows=5), candidate_plans(replace(oss, rows=5), gpu)[0]))
    shapes += [_shape_of(work, plan, gpu, 32, 0, False, True) for work, plan in examples_for(gpu, tuned, 0)]
    codes = (replace(oss, window=128, coded=True), replace(llama, coded=True), replace(llama, rows=1, coded=True))
    for work in examples_for(gpu, codes, 1):
        shapes.append(_shape_of(work, candidate_plans(work, gpu)[0], gpu, 32, 0, work.head_dim == 64, True))
    drafts = examples_for(gpu, [_shape_of(short, candidate_plans(short, gpu)[0], gpu, 16, 1, False, True)], 0)
    shapes += [replace(shape, late_rows=True) for shape in drafts]
    hybrid = AttentionWork(1, 1, 8, 2, 256, None, 0, 128)
    hybrids = [replace(hybrid, rows=rows, coded=coded) for rows in (1, 4) for coded in (False, True)]
    for work in examples_for(gpu, hybrids, 0):
        shapes.append(_shape_of(work, candidate_plans(work, gpu)[0], gpu, 32, 0, False, True))
    wide = [replace(work, head_dim=512, kv_heads=4) for work in hybrids]
    for work in examples_for(gpu, wide, 0):
        shapes.append(_shape_of(work, candidate_plans(work, gpu)[0], gpu, 32, 0, False, True))
    capped = AttentionWork(1, 4, 2, 8, 256, None, 0, 256)
    for work in examples_for(gpu, (capped, replace(capped, coded=True)), 0):
        shapes.append(replace(_shape_of(work, candidate_plans(work, gpu)[0], gpu, 32, 0, False, True), softcap=50.0))
    many = replace(llama, batch=32)
    for work in examples_for(gpu, (many, replace(many, group=8, head_dim=64, window=128)), 0):
        shapes.append(_shape_of(work, candidate_plans(work, gpu)[0], gpu, 32, 0, False, True))
    lists = examples_for(gpu, [_shape_of(llama, candidate_plans(llama, gpu)[0], gpu, 32, 0, False, True)], 0)
    shapes += [replace(shape, parts=2) for shape in lists]
    return [_make(shape) for shape in shapes]


def _check_sizes(batch: int, rows: int, heads: int, kv_heads: int, head_dim: int, block: int) -> None:
    HEAD_DIM.check("attention: the head size", head_dim)
    BLOCK_SIZE.check("attention: the cache's block", block)
    if heads % kv_heads:
        raise ShapeError(f"attention: {heads} query heads do not divide among {kv_heads} key-value heads")
    KV_HEADS.check("attention: key-value heads", kv_heads)
    ROWS_A_SLOT.check("attention: rows a slot", rows)
    SLOTS.check("attention: slots", batch)
    ROWS.check("attention: rows of all slots", batch * rows)
    QUERY_ROWS.check("attention: query rows of one key-value head", query_rows(rows, heads, kv_heads))


def _check_slots(
    batch: int, rows: int, *, slots: torch.Tensor, dense_lens: torch.Tensor, row_live: torch.Tensor
) -> None:
    check_shape("slots", slots, batch)
    check_shape("dense_lens", dense_lens, batch)
    check_shape("row_live", row_live, batch * rows)


def _check_dtypes(
    kv_scales: torch.Tensor | None,
    kv_heads: int,
    rows: tuple[tuple[str, torch.Tensor], ...],
    caches: tuple[tuple[str, torch.Tensor], ...],
) -> None:
    if kv_scales is not None:
        check_shape("kv_scales", kv_scales, 2, kv_heads)
    held = torch.bfloat16 if kv_scales is None else torch.uint8
    for name, tensor, dtype in (*((*row, torch.bfloat16) for row in rows), *((*cache_, held) for cache_ in caches)):
        if tensor.dtype != dtype:
            raise ShapeError(f"attention: {name} must be {dtype}, got {tensor.dtype}; codes come with kv_scales")


def _capacity(shape: AttentionShape, tail: int, positions: int) -> int:
    """The most splits that a slot can have."""
    splits = -(-(positions + tail) // shape.split)
    if shape.window is not None:
        kept = -(-(shape.first + shape.keep_first) // shape.split)
        splits = min(splits, kept + -(-(shape.window + tail) // shape.split) + 1)
    return splits


@cache
def _make(shape: AttentionShape) -> Kernel:
    pipeline = pipeline_bytes(shape.head_dim, shape.stages, shape.teams, shape.coded, shape.takes_turns)
    signature = (*(types.int64,) * 11, *(types.int32,) * 5, types.float32)
    threads = 32 * shape.warps
    return Kernel(
        shape.name, _kernel(shape), signature, threads, _min_blocks(shape), pipeline, most_blocks=shape.blocks
    )


def _min_blocks(shape: AttentionShape) -> int:
    """The blocks an SM by registers: one more than meet there leaves room for another kernel's, where
    nothing spills for it from 9.0 on."""
    if shape.whole or shape.halves > 1:
        return 1
    roomy = shape.head_dim == 128 and shape.window is None and shape.row_tiles == 1
    return max(3 if roomy else 2, shape.blocks)


def _kernel(shape: AttentionShape) -> Callable[..., None]:
    early, whole, threads, several = shape.early, shape.whole, 32 * shape.warps, shape.row_tiles > 1 and not shape.whole
    row_bytes = 2 * shape.head_dim * shape.group * shape.kv_heads
    read_rows, plan_slots = make_plan_functions(shape)
    walk, walk_spread = _make_walk(shape, read_rows), _make_walk(replace(shape, row_tiles=1), read_rows)
    spread, plan_ints = make_spread(shape), shape.slots * PLAN_STRIDE

    def attention(
        q: Any, k_cache: Any, v_cache: Any, table: Any, slots: Any, dense_lens: Any, row_live: Any, row_masks: Any,
        partials: Any, sums: Any, kv_scales: Any, batch: Any, rows: Any, tail: Any, width: Any, splits: Any, scale: Any,
    ) -> None:  # fmt: skip
        plan, row_ends = cuda.shared.array(plan_ints, int32), cuda.shared.array(MAX_ROWS, int32)
        shared_norms = cuda.shared.array(threads, float32)
        ptx.let_next_kernel_start()
        if not early:
            ptx.wait_for_previous_kernel()
            read_rows(plan, row_ends, slots, dense_lens, row_live, row_masks, batch, rows)
        plan_slots(plan, slots, dense_lens, batch, rows, tail)
        shared = plan, row_ends, shared_norms
        addresses = q, k_cache, v_cache, table, slots, dense_lens, row_live, row_masks, partials, sums, kv_scales
        sizes = batch, rows, width, splits
        if not several or not spread(plan, batch, rows):
            walk(shared, addresses, sizes, scale)
        else:
            walk_spread(shared, addresses, sizes, scale)
        if whole:
            clear_dead(row_ends, sums, int32(batch * rows), row_bytes, threads)

    return attention


def _make_walk(shape: AttentionShape, read_rows: Any) -> Any:
    """The function that walks a block's items after they are counted.

    read_rows  as `make_plan_functions` makes it
    """
    stages, early, late_rows, whole, warps = shape.stages, shape.early, shape.late_rows, shape.whole, shape.warps
    stage_bytes, takes_turns, exchange = shape.stage_bytes, shape.takes_turns, exchange_bytes(shape)
    rings, ring_bytes = stages * warps * stage_bytes, stages * shape.descriptor_bytes
    eights, split, half_bytes = shape.eights, shape.halves > 1, shape.row_bytes
    num_totals, num_queries, query_bytes = eights * shape.warp_dim // 4, query_words(shape), 2 * shape.warp_dim
    lane_offset, is_early, look_up, issue = (
        make(shape) for make in (make_lane_offset, make_is_early, make_look_up, make_issue)
    )
    enter, attend = enter_item(shape), make_attend(shape)
    merge, forget = make_merge(shape), make_forget(shape)
    wait_for_copies = ptx.copies_wait(stages - 1)

    @device_function
    def walk(shared: Any, addresses: Any, sizes: Any, scale: Any) -> None:
        plan, row_ends, shared_norms = shared
        q, k_cache, v_cache, table, slots, dense_lens, row_live, row_masks, partials, sums, kv_scales = addresses
        batch, rows, width, splits = sizes
        cursor = cuda.local.array(CURSOR_FIELDS, int32)
        totals, queries = cuda.local.array(num_totals, float32), cuda.local.array(num_queries, uint32)
        peaks, norms = cuda.local.array(eights, float32), cuda.local.array(eights, float32)
        lane, warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        base = uint32(base + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - (ALIGNMENT - 1))
        quarter = warp & uint32(3)  # of a tile
        mine, ring = warp * uint32(stage_bytes), uint32(base + uint32(rings) + warp * uint32(ring_bytes))
        offset, exchanged = lane_offset(lane), uint32(0)
        if takes_turns:
            exchanged = uint32(base + uint32(rings + warps * ring_bytes) + warp * uint32(exchange))
        if split:  # the second four warps have the second half of the dimensions
            half = int64(warp >> uint32(2))
            q, k_cache, v_cache = q + half * query_bytes, k_cache + half * half_bytes, v_cache + half * half_bytes
        enter(cursor, plan, int32(cuda.blockIdx.x), batch, rows)
        if early and cursor[PLACE] == NO_ITEM and int32(cuda.blockIdx.x) >= (max(batch * rows, 1) if whole else 1):
            return  # without waiting, which block 0 does for all; a block of a short window's dead row has to clear it
        waited = not early
        look_up(cursor, plan, table, width, quarter, lane)
        forget(totals, queries, peaks, norms, True)
        stage, filled = uint32(0), int32(0)
        while True:
            here, descriptor = uint32(base + stage * uint32(warps * stage_bytes)), uint32(ring + stage * uint32(16))
            full = filled >= stages
            if not waited and (full or cursor[PLACE] == NO_ITEM or not is_early(cursor, plan)):
                if not late_rows:
                    read_rows(plan, row_ends, slots, dense_lens, row_live, row_masks, batch, rows)
                ptx.wait_for_previous_kernel()
                if late_rows:
                    read_rows(plan, row_ends, slots, dense_lens, row_live, row_masks, batch, rows)
                waited = True
            if full:
                wait_for_copies()
                cuda.syncwarp()
                words = ptx.load_shared_128(descriptor)
                if int32(words[0]) == NO_ITEM:
                    break
                attend(
                    totals, queries, peaks, norms, q, row_ends, plan, words, uint32(here + mine), rows, scale,
                    kv_scales, quarter, lane, (offset, v_cache, descriptor, exchanged),
                )  # fmt: skip
                cuda.syncwarp()
                if words[0] & uint32(LAST_STEP):
                    merge(
                        totals, queries, peaks, norms, plan, words, here, shared_norms, warp, lane, partials, sums,
                        splits, rows, row_ends,
                    )  # fmt: skip
                    forget(totals, queries, peaks, norms, False)
            else:
                filled = int32(filled + 1)
            issue(
                cursor, plan, row_ends, uint32(here + mine + offset), descriptor, k_cache, v_cache, table, row_masks,
                batch, rows, width, quarter, lane,
            )  # fmt: skip
            ptx.copies_commit()
            look_up(cursor, plan, table, width, quarter, lane)
            stage = uint32(stage + uint32(1)) if stage != uint32(stages - 1) else uint32(0)

    return walk


@device_function
def clear_dead(row_ends: Any, out: Any, count: Any, row_bytes: Any, threads: Any) -> None:
    """Zero the results of rows that are dead or attend to nothing; one block for each row."""
    row = int32(cuda.blockIdx.x)
    while row < count:
        if row_ends[row] == 0:
            offset = int64(cuda.threadIdx.x) * 16
            while offset < row_bytes:
                zero = uint32(0)
                ptx.store_global_128(out + int64(row) * row_bytes + offset, zero, zero, zero, zero)
                offset += threads * 16
        row = int32(row + int32(cuda.gridDim.x))
