"""Decode GEMMs multiply few rows by a packed weight, with float32 accumulation, prologues and epilogues.

A persistent grid walks tiles of 16 weight rows, one, two or four at a time. The warps of a block divide a tile's K
steps (warp w takes steps w, w + WARPS, ..). Each has its own pipeline of asynchronous copies, which continues across
tiles. Other warps, the epilogue's, add a tile's sums in order and finish it, with operands loaded ahead, while the
first go on. The order of accumulation depends on the weight's shape alone, so a row has the same bits for every number
of rows.

No kernel writes weights. So a block begins to load them before the kernel before this one has ended, throttled so that
that kernel's reads do not queue. The rows' K steps are copied next to the weights', or a block norms few rows for
itself and holds them. For 33 to 128 rows a block's warps may share the copied rows: see `shared_rows`.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.rows import NUM_ARGUMENTS, PeerRows
from lowlat.kernels.common.activation import GELU_TANH, activation_label
from lowlat.kernels.common.norm_row import weights_label
from lowlat.kernels.common.pipeline import BARRIER_BYTES, make_pipeline
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live
from lowlat.kernels.formats import FP8, NVFP4
from lowlat.kernels.formats.int4 import int4_format
from lowlat.kernels.gemm.decode.epilogue import make_finishing
from lowlat.kernels.gemm.decode.mainloop import make_fill, make_multiplying
from lowlat.kernels.gemm.decode.norm_prologue import make_norm
from lowlat.kernels.gemm.decode.operands import BlockRow, NormPrologue, PartialArgmax, Rotation
from lowlat.kernels.gemm.decode.plan import (
    ADD,
    ALL_REDUCE,
    BFLOAT16,
    FLOAT32,
    GATE,
    GELU_GATE,
    MAX_ROWS,
    ROTATE,
    SILU,
    WARPS,
    ArgmaxShape,
    BlockShape,
    DecodeGemmPlan,
    DecodeGemmShape,
    HeadsShape,
    candidate_plans,
    choose_decode_plan,
    plan_decode_gemm,
    rows_at_once,
    steps_to_hold,
)
from lowlat.kernels.gemm.decode.shared_rows import shared_rows_kernel
from lowlat.kernels.gemm.decode.shared_rows_plan import (
    MOST_SHARED_ROWS,
    SharedRowsPlan,
    choose_shared_plan,
    shared_plans,
    shares_rows,
)
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.limits import DEPTH
from lowlat.kernels.gemm.packing import RUN, PackedMatrix
from lowlat.kernels.gemm.tiles import BF16_TILES
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.sampling.select import FINITE
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Argument, Gpu, Kernel, KernelCall, examples_for
from lowlat.kernels.toolchain.numba_cuda import cuda, float32, types, uint32
from lowlat.kernels.tuning.table import Planned

NUM_BESIDE = NUM_ARGUMENTS  # arguments of a kernel that only ROTATE or ALL_REDUCE uses
NUM_NORM = 2  # arguments of a norm
MAX_BLOCK_ROWS = 8  # the most rows to which rows of blocks are added

__all__ = [
    "GELU_GATE",
    "MAX_BLOCK_ROWS",
    "MAX_ROWS",
    "BlockRow",
    "DecodeGemmPlan",
    "NormPrologue",
    "PartialArgmax",
    "Rotation",
    "decode_gemm",
    "examples",
    "plan_decode_gemm",
    "steps_to_hold",
]


def decode_gemm(
    *,
    x: torch.Tensor,
    weight: PackedMatrix,
    out: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: torch.Tensor | None = None,
    gated_by: str = GATE,
    activation: str | None = None,
    softcap: float | None = None,
    rotation: Rotation | None = None,
    head_dim: int = 0,
    norm: NormPrologue | None = None,
    best: PartialArgmax | None = None,
    columns: torch.Tensor | None = None,
    beside: BlockRow | None = None,
    peers: PeerRows | None = None,
    parts: KParts | None = None,
    shares: bool = False,
    gpu: Gpu = H200,
    plan: DecodeGemmPlan | None = None,
) -> list[KernelCall]:
    """Compute x @ weight.T with prologue and epilogue, in one launch for each 64 rows, or `rows_at_once` of the GPU.

    x            [M, K]  bf16
    weight       [N, K]  packed, in bf16 or FP8 by row; with activation in the order of `gate_up_permutation`
    bias         [N]     bf16, in the weight's order
    row_live     [M]     uint8; with activation, gated or beside, dead rows are zero
    residual     [M, N]  bf16: out is the rounded sum of it and the product
    gated        [M, N]  bf16: out is `gated` times the sigmoid of the product, as in `output_gate`; or, with GELU_GATE,
                         times the product's GELU, as in `per_layer_gate`. Its rows may have a larger stride
    activation   "silu" or "gelu_tanh" of gates, times their ups; None: the weight has no gates and ups
    softcap      c: products x, with their bias, become c tanh(x / c), only in float32; None: they stay
    out          [M, N]  float32 or bf16; with activation [M, N / 2] bf16; with rotation the queries
                         [M, H, D] bf16, or None if there are none
    norm         x is normed first; only for numbers and widths of rows for which `steps_to_hold` is not 0
    best         the partial argmax of rows in float32 is written next to them
    columns      [N / 8] int32, from `runs_of` a permuted weight's order: out has the original columns. Only for a GEMM
                 without residual, activation, rotation, block or best; None: columns are in the weight's order
    beside       a row of a block is added to each row in float32; for at most 8 rows
    peers        each rank has some columns of K, and the product is summed over ranks before the residual is added
    parts        of K: each is summed by itself, the first has the bias, and they are added as `cuts.tree_sum` does;
                 without norm, activation, rotation or best
    shares       whether more than 32 rows take launches of 128 whose warps share copied rows, if `shares_rows`; no bit
                 changes
    rotation     the GEMM computes queries, keys and values of `head_dim`, in the order of `rope_permutation`
    gpu, plan    the GPU, and the plan; None: from the GPU's tuning table, or `plan_decode_gemm`'s
    Time: the weight's bytes over the memory's bandwidth. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    count, depth = x.shape
    check_shape("x", x, count, weight.columns)
    DEPTH.check("a GEMM's depth", depth)
    before, held = (None, 0) if norm is None else (_norm_eps(norm, x), steps_to_hold(count, depth, gpu))
    if norm is not None and not held:
        raise ShapeError(f"no block norms and holds {count} rows of {depth} elements")
    if rotation is not None:
        heads = _heads(weight, rotation, out, count, head_dim)
        shape = DecodeGemmShape(weight.rows, depth, ROTATE, bias is not None, False, heads, before)
        row_live = rotation.row_live
    elif out is None:
        raise ShapeError("a GEMM without rotation needs `out`")
    else:
        activates = activation is not None
        check_shape("out", out, count, weight.rows // 2 if activates else weight.rows)
        epilogue = gated_by if gated is not None else _epilogue(out, activates, residual, peers)
        kept = None if best is None else _argmax_shape(best, count, epilogue)
        zeroes = activates or gated is not None or beside is not None
        live, scattered = zeroes and row_live is not None, columns is not None
        shape = DecodeGemmShape(weight.rows, depth, epilogue, bias is not None, live, None, before, kept, scattered)
    wide_norm = norm is not None and are_wide(norm.weight)
    normed_rows = None if norm is None else norm.out
    shape = replace(
        shape, wide_norm=wide_norm, keeps_norm=normed_rows is not None, weights=weight.tile_format,
        ranks=1 if peers is None else peers.size, parts=parts,
    )  # fmt: skip
    shape = replace(shape, block=_block_shape(beside, count, shape), softcap=softcap)
    if activation is not None:
        shape = replace(shape, activation=activation)
    _check_together(shape, columns)
    if normed_rows is not None:
        _check_kept(normed_rows, x, shape)
    if gated is not None:
        _check_gated(gated, out, shape, activates=activation is not None, residual=residual)
        shape = replace(shape, pitch=gated.stride(0) if gated_by == GELU_GATE else 0)
    calls = []
    normed = (0,) * NUM_NORM if norm is None else _norm_arguments(norm)
    for part, wide in _launches(count, shape, gpu, shares, plan):
        rows = part.stop - part.start
        chosen, planned = _chosen(rows, wide, shape, gpu, held, plan)
        pairs = None if best is None else _pairs_of(best, part, chosen)
        alive = None if row_live is None else row_live.reshape(-1)[part]
        rows_beside = residual if gated is None else gated
        added = columns if beside is None else beside.block[beside.row :]
        added = added if rows_beside is None else _span(rows_beside[part])
        optional = (alive, bias, added, None if out is None else out[part], pairs)
        arguments: tuple[Argument, ...] = (weight.memory, x[part], *(0 if each is None else each for each in optional))
        arguments = (*arguments, rows, *_beside(rotation, peers, part, normed_rows), *normed)
        calls.append(KernelCall(_make(shape, chosen), (chosen.num_blocks, 1, 1), arguments, planned=planned))
    return calls


def _launches(
    count: int, shape: DecodeGemmShape, gpu: Gpu, shares: bool, plan: DecodeGemmPlan | None
) -> Iterator[tuple[slice, bool]]:
    """The rows of each launch, and whether its warps share them."""
    start, usual = 0, MAX_ROWS if plan else rows_at_once(gpu)
    while start < count:
        most = min(count - start, MOST_SHARED_ROWS)
        wide = isinstance(plan, SharedRowsPlan) or (plan is None and shares and shares_rows(most, shape, gpu))
        part = slice(start, start + (most if wide else min(most, usual)))
        yield part, wide
        start = part.stop


def _chosen(
    rows: int, wide: bool, shape: DecodeGemmShape, gpu: Gpu, held: int, plan: DecodeGemmPlan | None
) -> tuple[DecodeGemmPlan, Planned | None]:
    """A launch's plan, and its key in tuning tables if it was not given."""
    if plan is not None:
        return _given(plan, shape, held), None
    return choose_shared_plan(rows, shape, gpu) if wide else choose_decode_plan(rows, shape, gpu, held)


def _span(rows: torch.Tensor) -> torch.Tensor:
    """Rows; for rows of a wider matrix all of its numbers from their first to their last, [n]."""
    return rows if rows.is_contiguous() else rows.as_strided(((len(rows) - 1) * rows.stride(0) + rows.shape[1],), (1,))


def _given(plan: DecodeGemmPlan, shape: DecodeGemmShape, held: int) -> DecodeGemmPlan:
    """The caller's plan with the fields that the shape decides. Raises ShapeError if K is summed in parts and the plan
    takes several steps at once, or has too few warps for its sets."""
    if plan.span > 1 and shape.parts is not None:
        raise ShapeError(f"K of {shape.depth} is summed in parts of one step at a time, not of {plan.span}")
    if plan.sets * (WARPS if shape.parts is None else shape.parts.count) > WARPS:
        raise ShapeError(f"{WARPS} warps do not multiply {plan.sets} sets of tiles side by side")
    return replace(plan, steps_held=held, keeps_argmax=shape.best is not None, tile_bytes=shape.weights.shared_bytes)


def _heads(weight: PackedMatrix, rotation: Rotation, out: torch.Tensor | None, count: int, head_dim: int) -> HeadsShape:
    queries = 0 if out is None else out.shape[1]
    check_shape("positions", rotation.positions.reshape(-1), count)
    if out is not None:
        check_shape("out", out, count, queries, head_dim)
    if rotation.k_cache is None or rotation.block_table is None or rotation.offsets is None:
        groups, block, width, rows = 0, 0, 0, 1
    else:
        groups, block = rotation.k_cache.shape[1:3]
        width, rows = rotation.block_table.shape[1], rotation.offsets.shape[0]
    if weight.rows != (queries + 2 * groups) * head_dim:
        raise ShapeError(
            f"a weight of {weight.rows} rows does not hold {queries} queries and {groups} keys and values of {head_dim}"
        )
    coded = rotation.kv_scales is not None
    for cache_ in (rotation.k_cache, rotation.v_cache):
        if cache_ is not None:
            check_dtype(torch.uint8 if coded else torch.bfloat16, cache=cache_)
    return HeadsShape(queries, groups, head_dim, rows, block, width, coded)


def _rotation_arguments(rotation: Rotation, part: slice) -> tuple[Argument, ...]:
    tables = (rotation.positions.reshape(-1)[part], rotation.cos, rotation.sin)
    caches = (rotation.k_cache, rotation.v_cache, rotation.block_table)
    rows = (rotation.slots, rotation.write_lens, rotation.offsets)
    optional = (*caches, *rows, rotation.kv_scales)
    return (*tables, *(0 if each is None else each for each in optional), part.start)


def _argmax_shape(best: PartialArgmax, rows: int, epilogue: str) -> ArgmaxShape:
    check_shape("best.pairs", best.pairs, rows, best.pairs.shape[1], 2)
    check_dtype(torch.int32, pairs=best.pairs)
    if epilogue != FLOAT32:
        raise ShapeError(f"best pairs are of a GEMM's float32 rows, not of {epilogue} ones")
    return ArgmaxShape(best.pairs.shape[1], best.limit)


def _block_shape(beside: BlockRow | None, rows: int, shape: DecodeGemmShape) -> BlockShape | None:
    if beside is None:
        return None
    slots, rest = divmod(rows, beside.wide)
    block = BlockShape(beside.wide, beside.block.shape[0] // max(slots, 1))
    check_shape("block", beside.block, beside.block.shape[0], shape.width)
    check_dtype(torch.float32, block=beside.block)
    if shape.epilogue != FLOAT32 or rest or rows > MAX_BLOCK_ROWS:
        raise ShapeError(
            f"a block's row is added to at most {MAX_BLOCK_ROWS} float32 rows, a multiple of {beside.wide}, not to "
            f"{rows} {shape.epilogue} ones"
        )
    if beside.block.shape[0] != slots * block.rows or not 0 <= beside.row < block.rows:
        raise ShapeError(f"{slots} slots have no row {beside.row} in a block of {beside.block.shape[0]} rows in all")
    return block


def _epilogue(out: torch.Tensor, activates: bool, residual: torch.Tensor | None, peers: PeerRows | None) -> str:
    """The epilogue of a GEMM without rotation."""
    wide = FLOAT32 if out.dtype == torch.float32 else BFLOAT16
    epilogue, (count, width) = SILU if activates else ADD if residual is not None else wide, out.shape
    if peers is None:
        return epilogue
    if epilogue != ADD or peers.width != width or peers.rows < min(count, MAX_ROWS):
        raise ShapeError(
            f"ranks add up {peers.rows} rows of {peers.width} and a residual, not {count} of {width} with {epilogue}"
        )
    return ALL_REDUCE


def _beside(
    rotation: Rotation | None, peers: PeerRows | None, part: slice, kept: torch.Tensor | None
) -> tuple[Argument, ...]:
    """The arguments that only ROTATE or ALL_REDUCE uses; the first is the buffer for normed rows, if they are kept."""
    if rotation is not None:
        return _rotation_arguments(rotation, part)
    if kept is not None:
        return kept[part], *(0,) * (NUM_BESIDE - 1)
    return (0,) * NUM_BESIDE if peers is None else peers.arguments


def _check_together(shape: DecodeGemmShape, columns: torch.Tensor | None) -> None:
    if shape.softcap is not None and (shape.epilogue != FLOAT32 or shape.block is not None):
        raise ShapeError(f"a softcap is of float32 rows without a block's, not of {shape.epilogue} ones")
    if shape.parts is not None:
        _check_parts(shape.parts, shape)
    if columns is not None:
        _check_columns(columns, shape)


def _check_gated(
    gated: torch.Tensor,
    out: torch.Tensor | None,
    shape: DecodeGemmShape,
    *,
    activates: bool,
    residual: torch.Tensor | None,
) -> None:
    alone = shape.epilogue in (GATE, GELU_GATE) and not (activates or residual is not None)
    if not alone or shape.ranks > 1 or shape.best or shape.block or shape.scattered or shape.parts:
        raise ShapeError("a gate has no residual, activation, rotation, block, columns, best pairs, parts or ranks")
    if out is not None:
        check_shape("gated", gated, *out.shape)
        check_dtype(torch.bfloat16, gated=gated, out=out)
    if gated.stride(1) != 1 or (shape.epilogue == GATE and not gated.is_contiguous()):
        raise ShapeError(f"rows that are gated lie side by side, got strides {gated.stride()}")


def _check_kept(kept: torch.Tensor, x: torch.Tensor, shape: DecodeGemmShape) -> None:
    check_shape("norm.out", kept, *x.shape)
    check_dtype(torch.bfloat16, norm_out=kept)
    if shape.epilogue != FLOAT32 or shape.best is not None or shape.block is not None:
        raise ShapeError(f"normed rows are kept by plain GEMMs, not with {shape.epilogue}, a block or best pairs")


def _check_parts(parts: KParts, shape: DecodeGemmShape) -> None:
    if shape.epilogue in (SILU, ROTATE) or shape.norm_eps is not None or shape.best is not None or shape.block:
        raise ShapeError(f"K is summed in parts without norm, block and best pairs, and not with {shape.epilogue}")
    if parts.count not in (1, 2, 4, WARPS) or shape.depth % 64:
        raise ShapeError(f"K is summed in 1, 2, 4 or {WARPS} parts of whole steps, not {shape.depth} in {parts.count}")


def _check_columns(columns: torch.Tensor, shape: DecodeGemmShape) -> None:
    if shape.epilogue not in (FLOAT32, BFLOAT16) or shape.best is not None or shape.block is not None:
        kind = f"{shape.epilogue} ones, those with a block"
        raise ShapeError(f"columns are of plain GEMMs, not of {kind} or those that keep best pairs")
    if shape.width % RUN:
        raise ShapeError(f"columns come in runs of {RUN}, which do not divide a weight of {shape.width} rows")
    check_shape("columns", columns, shape.width // RUN)
    check_dtype(torch.int32, columns=columns)


def _pairs_of(best: PartialArgmax, part: slice, plan: DecodeGemmPlan) -> torch.Tensor:
    if plan.num_blocks > best.pairs.shape[1]:
        raise ShapeError(f"best.pairs has {best.pairs.shape[1]} places a row, {plan.num_blocks} blocks leave a pair")
    return best.pairs[part]


def _norm_eps(norm: NormPrologue, x: torch.Tensor) -> float:
    rows, depth = x.shape
    check_shape("norm.weight", norm.weight, depth)
    check_row_live(norm.row_live, rows)
    check_dtype(torch.bfloat16, x=x)
    return norm.eps


def _norm_arguments(norm: NormPrologue) -> tuple[Argument, ...]:
    return norm.weight, 0 if norm.row_live is None else norm.row_live


@cache
def _make(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Kernel:
    flags = "".join(letter for letter, on in (("b", shape.bias), ("l", shape.live), ("s", shape.scattered)) if on)
    heads = "" if shape.heads is None else "_" + "x".join(str(int(each)) for each in astuple(shape.heads))
    norm = (
        ""
        if shape.norm_eps is None
        else f"_norm_eps{shape.norm_eps!r}{weights_label(shape.wide_norm)}{'_kept' * shape.keeps_norm}"
    )
    best = "" if shape.best is None else f"_best{shape.best.blocks}x{shape.best.limit:x}"
    ranks = f"_ranks{shape.ranks}" if shape.ranks > 1 else ""
    kind = "" if shape.weights == BF16_TILES else f"{shape.weights.label}_"
    parts = "" if shape.parts is None else f"_{shape.parts.name}x{plan.sets}"
    block = "" if shape.block is None else "_block" + "x".join(map(str, astuple(shape.block)))
    capped = "" if shape.softcap is None else f"_cap{shape.softcap!r}"
    pitch = f"_pitch{shape.pitch}" if shape.pitch else ""
    shared = "_shared" if isinstance(plan, SharedRowsPlan) else ""
    name = (
        f"decode_gemm_{kind}{shape.epilogue}{activation_label(shape.activation)}{ranks}{parts}{heads}_"
        f"{shape.width}x{shape.depth}_{flags}_"
        f"{plan.row_tiles}x{plan.columns}x{plan.weight_tiles}x{plan.stages}x{plan.areas}"
        f"{f'x{plan.span}' if plan.span > 1 else ''}{'_dense' * (plan.density - 1)}"
        f"{norm}{best}{block}{capped}{pitch}{shared}{'' if plan.suspends else '_awake'}"
    )
    signature = (types.int64,) * (8 + NUM_BESIDE + NUM_NORM)
    make = shared_rows_kernel(shape, plan) if isinstance(plan, SharedRowsPlan) else _kernel(shape, plan)
    return Kernel(name, make, signature, plan.threads, plan.sharing, plan.shared_bytes)


def _kernel(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Callable[..., None]:
    ring_bytes, finishing = plan.stages * plan.stage_bytes, plan.finishing
    sums_at = WARPS * ring_bytes
    barriers_at = sums_at + plan.areas * WARPS * plan.sum_bytes
    held_at = barriers_at + plan.areas * BARRIER_BYTES
    multiplying = WARPS if shape.parts is None else shape.parts.count * plan.sets  # warps; others are idle
    pipeline = make_pipeline(plan.areas, multiplying, finishing, suspends=plan.suspends)
    begin_pipeline, fill = pipeline.begin, make_fill(shape, plan)
    multiply_tiles, finish = make_multiplying(shape, plan, pipeline), make_finishing(shape, plan, pipeline)
    norm, scales_at = make_norm(shape, plan), shape.scales_at
    begin_norm, norm_rows, num_words, num_scales = norm.begin, norm.finish, norm.words, norm.scales

    def decode_gemm(
        weight: Any, x: Any, row_live: Any, bias: Any, residual: Any, out: Any, bests: Any, count: Any, positions: Any,
        cosines: Any, sines: Any, k_cache: Any, v_cache: Any, table: Any, slots: Any, write_lens: Any, offsets: Any,
        kv_scales: Any, first_row: Any, norm_weight: Any, norm_live: Any,
    ) -> None:  # fmt: skip
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        words, scales = cuda.local.array(num_words, uint32), cuda.local.array(num_scales, uint32)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        mine = base + warp * uint32(ring_bytes) + lane * uint32(16)
        totals, barriers, held = base + uint32(sums_at), base + uint32(barriers_at), base + uint32(held_at)
        if thread == uint32(0):
            begin_pipeline(barriers)
        ptx.let_next_kernel_start()
        begin_norm(scales, norm_weight, thread)
        ahead = uint32(cuda.blockIdx.x), warp, 0
        if warp < uint32(multiplying):  # weights do not depend on the kernel before
            ahead = fill(mine, weight, warp, lane)
        cuda.syncthreads()
        ptx.wait_for_previous_kernel()
        norm_rows(held, words, scales, x, norm_live, count, positions, thread)
        if warp < uint32(multiplying):
            multiply_tiles(mine, held, totals, barriers, weight, x, count, ahead, thread)
        elif uint32(WARPS) <= warp < uint32(WARPS + finishing):
            written = (k_cache, v_cache, table, slots, write_lens, offsets, kv_scales, first_row)
            beside = (positions, cosines, sines, *written)  # with ALL_REDUCE the peers' arguments, in these places
            finish(totals, barriers, thread, row_live, bias, residual, out, bests, count, beside, weight + scales_at)

    return decode_gemm


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Representative specialisations for a GPU: GEMMs of Llama-3.1-8B, all epilogues, odd shapes."""
    made = []
    products = (
        (16, 28672, 4096, SILU),
        (64, 4096, 14336, ADD),
        (1, 6144, 4096, FLOAT32),
        (4, 28672, 4096, SILU),
        (8, 4096, 14336, ADD),
        (32, 4096, 14336, ADD),
        (3, 97, 200, BFLOAT16),
        (4, 4096, 2048, GATE),
    )
    for rows, width, depth, epilogue in examples_for(gpu, products, 3):
        shape = DecodeGemmShape(width, depth, epilogue, bias=width == 97, live=epilogue in (SILU, GATE))
        made.append(_make(shape, plan_decode_gemm(min(rows, rows_at_once(gpu)), width, gpu)))
    chosen = DecodeGemmShape(128256, 4096, FLOAT32, False, False, best=ArgmaxShape(gpu.num_multiprocessors, FINITE))
    for rows in examples_for(gpu, (1, 16), 1):
        made.append(_make(chosen, plan_decode_gemm(rows, 128256, gpu, keeps_argmax=True)))
    capped = replace(chosen, width=262144, depth=5376, softcap=30.0)
    made.append(_make(capped, plan_decode_gemm(1, 262144, gpu, keeps_argmax=True)))
    gelu = DecodeGemmShape(43008, 5376, SILU, False, True, activation=GELU_TANH)
    made.append(_make(gelu, plan_decode_gemm(1, 43008, gpu)))
    gates = DecodeGemmShape(256, 2560, GELU_GATE, False, True, pitch=10752)
    made.append(_make(gates, plan_decode_gemm(1, 256, gpu)))
    biased = replace(chosen, depth=256, live=True, block=BlockShape(1, 7))
    made.append(_make(biased, plan_decode_gemm(1, 128256, gpu, keeps_argmax=True)))
    scattered = DecodeGemmShape(6144, 4096, BFLOAT16, True, False, scattered=True)
    made.append(_make(scattered, plan_decode_gemm(4, 6144, gpu)))
    for rows, ranks in examples_for(gpu, ((1, 2), (4, 8)), 1):
        summed = DecodeGemmShape(2880, 2048, ALL_REDUCE, True, False, ranks=ranks)
        made.append(_make(summed, plan_decode_gemm(rows, 2880, gpu)))
    in_parts = (
        (1, DecodeGemmShape(4096, 14336, ADD, False, False, parts=KParts(8, 1))),
        (4, DecodeGemmShape(2880, 2048, ALL_REDUCE, True, False, ranks=2, parts=KParts(4, 8))),
        (64, DecodeGemmShape(4096, 2048, FLOAT32, True, False, weights=FP8.tiles(wide=False), parts=KParts(2, 2))),
    )
    for rows, shape in examples_for(gpu, in_parts, 1):
        most = min(rows, rows_at_once(gpu))
        plan = plan_decode_gemm(most, shape.width, gpu, weights=shape.weights, parts=shape.parts)
        made.append(_make(shape, plan))
    rotated = DecodeGemmShape(6144, 4096, ROTATE, False, False, HeadsShape(32, 8, 128, 4, 32, 289))
    made.append(_make(rotated, plan_decode_gemm(4, 6144, gpu)))
    heads = HeadsShape(64, 8, 64, 1, 32, 1025, coded=True)
    normed = (
        (1, DecodeGemmShape(5120, 2880, ROTATE, True, False, heads, 1e-5)),
        (4, DecodeGemmShape(28672, 4096, SILU, False, True, None, 1e-5)),
        (8, DecodeGemmShape(97, 2880, FLOAT32, False, False, None, 1e-5)),
        (1, DecodeGemmShape(97, 8192, BFLOAT16, True, False, None, 1e-6)),
    )
    grouped = int4_format(32, has_zeros=True).tiles(wide=True)
    quantised = (
        (64, DecodeGemmShape(4096, 14336, ADD, False, False, weights=grouped)),
        (4, replace(rotated, norm_eps=1e-5, weights=FP8.tiles(wide=False))),
        (1, DecodeGemmShape(28672, 4096, SILU, False, True, None, 1e-5, weights=NVFP4.tiles(wide=False))),
    )
    for rows, shape in examples_for(gpu, quantised, 1):
        held = 0 if shape.norm_eps is None else steps_to_hold(rows, shape.depth, gpu)
        most = min(rows, rows_at_once(gpu))
        plan = plan_decode_gemm(most, shape.width, gpu, held, weights=shape.weights, depth=shape.depth)
        made.append(_make(shape, plan))
    kept = DecodeGemmShape(5120, 2048, FLOAT32, False, False, None, 1e-6, wide_norm=True, keeps_norm=True)
    for rows, shape in (*examples_for(gpu, normed, 2), (1, kept), (8, kept)):
        if held := steps_to_hold(rows, shape.depth, gpu):
            made.append(_make(shape, plan_decode_gemm(rows, shape.width, gpu, held)))
    return made + _many_steps(gpu) + _shared_rows(gpu)


def _shared_rows(gpu: Gpu) -> list[Kernel]:
    """Shared rows, 64 and 128: all plans, and the epilogues and weights that need most registers."""
    heads = HeadsShape(32, 8, 128, 4, 32, 129)
    cases = (
        (128, DecodeGemmShape(28672, 4096, SILU, False, True)),
        (128, DecodeGemmShape(6144, 4096, ROTATE, False, False, heads)),
        (128, DecodeGemmShape(4096, 14336, ADD, False, False)),
        (128, DecodeGemmShape(128256, 4096, FLOAT32, False, False, best=ArgmaxShape(gpu.num_multiprocessors, FINITE))),
        (64, DecodeGemmShape(28672, 4096, SILU, False, True)),
        (64, DecodeGemmShape(4096, 4096, ADD, False, False)),
        (128, DecodeGemmShape(28672, 4096, SILU, False, True, weights=FP8.tiles(wide=False))),
        (128, DecodeGemmShape(28672, 4096, SILU, True, True, weights=int4_format(32, has_zeros=True).tiles(wide=True))),
        (64, DecodeGemmShape(4096, 4096, ADD, False, False, weights=NVFP4.tiles(wide=False))),
    )
    chosen = ((rows, shape) for rows, shape in examples_for(gpu, cases, 1) if shared_plans(rows, shape, gpu))
    return [_make(shape, shared_plans(rows, shape, gpu)[0]) for rows, shape in chosen]


def _many_steps(gpu: Gpu) -> list[Kernel]:
    """Four steps of a warp at once, two blocks an SM: no register is left."""
    codes = int4_format(128, has_zeros=False).tiles(wide=False)
    packed = DecodeGemmShape(28672, 4096, SILU, False, True, None, 1e-5, weights=codes)
    made = []
    for shape in examples_for(gpu, (packed,), 0):
        held = steps_to_hold(1, shape.depth, gpu)
        plans = candidate_plans(1, shape.width, gpu, held, weights=codes, depth=shape.depth)
        made.append(_make(shape, next(plan for plan in plans if (plan.span, plan.density) == (4, 2))))
    return made
