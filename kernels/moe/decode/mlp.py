"""This module runs an MoE layer for few rows in one launch, from top-k routing to the residual sum.

In between are the gate and up GEMM, SwiGLU, and the weighted down GEMM. The launch may begin while the router still
runs: blocks wait for the logits, and prefetch weights as soon as they know their experts. Every block has a run of the
tiles of both GEMMs, and parts of the sum. A tile of the second GEMM needs activations from many blocks, and the sum
needs outputs of many. Blocks wait for them word by word (`sentinels`), so all blocks must be on the GPU at once.
Weights of the second GEMM are prefetched while the last tiles of the first are multiplied; with a single row, after
them. `gemm` tells how a GEMM is computed, and `experts` runs each GEMM in a launch of its own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.rows import NUM_ARGUMENTS, PeerRows
from lowlat.kernels.common.activation import SILU
from lowlat.kernels.common.pipeline import BARRIER_BYTES, make_pipeline
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.formats import BF16, FP8, MXFP4, WeightFormat
from lowlat.kernels.moe.decode.expert_list import make_list_units
from lowlat.kernels.moe.decode.gemm import (
    make_finishing,
    make_multiplying,
    make_prefetching,
    nothing_prefetched,
    run_of,
)
from lowlat.kernels.moe.decode.mlp_plan import MlpPlan, choose_mlp_plan, plan_mlp
from lowlat.kernels.moe.decode.swiglu_epilogue import make_swiglu
from lowlat.kernels.moe.decode.topk_sum import make_sum_rows
from lowlat.kernels.moe.decode.weighing_epilogue import make_weighing
from lowlat.kernels.moe.formats import tiled_format
from lowlat.kernels.moe.packing import PackedExperts, check_expert_bias, shape_of
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape, parts_of, rows_a_launch
from lowlat.kernels.moe.topk_routing import TopKRouting, make_publish, make_route
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Argument, Gpu, Kernel, KernelCall, examples_for
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "experts_mlp"]


def experts_mlp(
    *,
    x: torch.Tensor,
    routing: TopKRouting,
    gate_up: PackedExperts,
    gate_up_bias: torch.Tensor | None = None,
    down: PackedExperts,
    down_bias: torch.Tensor | None = None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activated: torch.Tensor,
    partials: torch.Tensor,
    residual: torch.Tensor,
    total: torch.Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    activation: str = SILU,
    early: bool = False,
    peers: PeerRows | None = None,
    many: bool = False,
    gpu: Gpu = H200,
    plan: MlpPlan | None = None,
) -> list[KernelCall]:
    """Choose each row's experts, and add their outputs to the residual stream; a launch for every `rows_a_launch` rows.

    x               [M, K]      bf16; with MXFP4 magnitudes below 2**64
    routing         the logits by which rows choose their experts
    gate_up         [E, 2I, K]  packed in the order of `gate_up_permutation`
    gate_up_bias    [E, 2I]     bf16, in the weight's order; None: none
    down            [E, N, I]   packed
    down_bias       [E, N]      bf16; None: none
    expert_ids      [M, k]      int32    out: largest logit first; -1 dead
    expert_weights  [M, k]      float32  out: 0 where dead
    activated       [M, k, I]   bf16     out: (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up
                                         within +-`limit`, or without them up * gate * sigmoid(gate); in float32,
                                         rounded once; zero where dead
    activation      "silu", or "gelu_tanh" without a limit: up * gelu(gate)
    partials        [M, k, N]   float32  out: weight * (down @ activated + bias), every product and sum rounded by
                                         itself; zero where dead
    residual        [M, N]      bf16
    total           [M, N]      bf16     out: residual + the sum of the partials from a row's first expert to its last
    early           the launch waits for logits while the previous kernel still writes them; they must have been filled
                    with `sentinels.MISSING` before the kernel before that one ended
    peers           the sums of partials are added up over GPUs, each of which has a shard of every expert's inner width
    many            launches have more rows, see `parts_of`; no bit changes
    gpu             the GPU that it runs on: all blocks must be on it at once, one an SM
    plan            the plan of both GEMMs; None: that of the GPU's table, or of `plan_mlp`
    activated and partials must be filled with `sentinels.MISSING` before, since blocks wait there for other blocks.
    It lets the next kernel start only after the previous kernel has ended, so that all earlier writes are then visible.
    Time: the distinct experts' bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit.
    """
    rows, top_k = expert_ids.shape
    routing.check(rows, top_k, gate_up.num_experts)
    _check_weights(gate_up, gate_up_bias, down, down_bias)
    check_shape("x", x, rows, gate_up.columns)
    check_shape("expert_weights", expert_weights, rows, top_k)
    check_shape("activated", activated, rows, top_k, down.columns)
    check_shape("partials", partials, rows, top_k, down.rows)
    check_shape("residual", residual, rows, down.rows)
    check_shape("total", total, rows, down.rows)
    check_dtype(torch.bfloat16, x=x, activated=activated, residual=residual, total=total)
    check_dtype(torch.float32, expert_weights=expert_weights, partials=partials)
    check_dtype(torch.int32, expert_ids=expert_ids)
    up_shape = shape_of(
        GATE_UP, gate_up, top_k, biased=gate_up_bias is not None, clamped=limit is not None, activation=activation
    )
    down_shape = shape_of(DOWN, down, top_k, biased=down_bias is not None)
    biases: list[Argument] = [0 if each is None else each for each in (gate_up_bias, down_bias)]
    gpus = _gpus(peers, min(rows, rows_a_launch(top_k)), down.rows)
    calls = []
    for part, count in parts_of(rows, top_k, many=many):
        chosen, planned = plan, None
        if chosen is None:
            chosen, planned = choose_mlp_plan(count, up_shape, down_shape, gpu, routing.num_experts, gpus)
        arguments = (
            *(*gate_up.arguments, biases[0], *down.arguments, biases[1]),
            *(x[part], *routing.of(part), expert_ids[part], expert_weights[part], activated[part], partials[part]),
            *(residual[part], total[part], count * top_k, int(early)),
            *((0,) * NUM_ARGUMENTS if peers is None else peers.arguments),
            *(limit or 0.0, alpha or 0.0),
        )
        kernel = _make(chosen, routing.num_experts, routing.over_all, gpus, routing.shared)
        calls.append(KernelCall(kernel, (chosen.up_plan.num_blocks, 1, 1), arguments, planned=planned))
    return calls


def _gpus(peers: PeerRows | None, rows: int, width: int) -> int:
    """Return the number of GPUs that add up their sums. Raises ShapeError for peer memory of other rows."""
    if peers is None:
        return 1
    if peers.width != width or peers.rows < rows:
        raise ShapeError(f"GPUs add up {peers.rows} rows of {peers.width}, not {rows} of {width}")
    return peers.size


def _check_weights(
    gate_up: PackedExperts, gate_up_bias: torch.Tensor | None, down: PackedExperts, down_bias: torch.Tensor | None
) -> None:
    check_expert_bias(gate_up_bias, gate_up, "gate_up_bias")
    check_expert_bias(down_bias, down, "down_bias")
    follows = gate_up.rows == 2 * down.columns and gate_up.num_experts == down.num_experts
    if not follows or any(width % 8 for width in (gate_up.columns, down.columns, down.rows)):
        raise ShapeError(
            f"experts_mlp: {down.num_experts} down matrices {down.rows} by {down.columns} do not follow "
            f"{gate_up.num_experts} gate_up matrices {gate_up.rows} by {gate_up.columns}, whose widths must be "
            "multiples of 8"
        )


@cache
def _make(plan: MlpPlan, num_experts: int, over_all: bool = False, gpus: int = 1, shared: bool = False) -> Kernel:
    up, down, first, second = plan.up, plan.down, plan.up_plan, plan.down_plan
    name = (
        f"experts_mlp_{up.rows}x{up.columns}x{down.rows}x{up.top_k}_"
        f"{up.label}{down.label}_"
        f"{first.columns}x{first.capacity}x{first.warps}x{second.warps}x{first.finishing}x{first.part}x{second.part}"
        f"x{first.stages}{'_pairs' if first.together > 1 else ''}{'' if plan.overlaps else '_apart'}"
        f"{'' if first.suspends else '_awake'}_e{num_experts}"
        f"{'_over_all' if over_all else ''}{'_shared' if shared else ''}{f'_gpus{gpus}' if gpus > 1 else ''}"
    )
    signature = (*(types.int64,) * (19 + NUM_ARGUMENTS), types.float32, types.float32)
    function, shared_bytes = _kernel(plan, num_experts, over_all, gpus, shared), plan.places[-1]
    return Kernel(name, function, signature, plan.whole.threads, 1, shared_bytes, most_blocks=1)


def _kernel(plan: MlpPlan, num_experts: int, over_all: bool, gpus: int, shared: bool) -> Callable[..., None]:
    up, down, first, second, whole = plan.up, plan.down, plan.up_plan, plan.down_plan, plan.whole
    up_tiles, down_tiles, warps, stages = up.tiles, down.tiles, plan.warps, first.stages
    up_areas_at, down_areas_at, lists_at, barriers_at, _ = plan.places
    up_sums = make_pipeline(stages, first.warps, first.finishing, suspends=first.suspends)
    down_sums = make_pipeline(stages, second.warps, second.finishing, suspends=second.suspends)
    up_sources, up_begin, _ = make_prefetching(up, first)
    down_sources, down_begin, down_prefetch = make_prefetching(down, second)
    overlaps, stage_bytes = plan.overlaps, plan.stage_bytes
    fill, multiply_up = make_multiplying(
        up, first, up_sums, stage_bytes, down_prefetch if overlaps else nothing_prefetched
    )
    fill_down, multiply_down = make_multiplying(down, second, down_sums, stage_bytes, nothing_prefetched, awaited=True)
    swiglu, weighing = make_swiglu(up, first), make_weighing(down, second)
    finish_up = make_finishing(up, first, swiglu, up_sums, warps * 32)
    finish_down = make_finishing(down, second, weighing, down_sums, warps * 32)
    clear_up, clear_down, begin_up, begin_down = swiglu.clear, weighing.clear, up_sums.begin, down_sums.begin
    route, publish = make_route(whole, up.top_k, num_experts, over_all, shared), make_publish(whole, whole.capacity)
    list_units, wait_for_all = make_list_units(whole, up.top_k), ptx.copies_wait(0)
    up_warps, down_warps, top_k = first.warps, second.warps, up.top_k
    sum_rows = make_sum_rows(down.rows, top_k, first.finishing, gpus)

    @device_function
    def none_left(run: Any, takes_part: Any) -> Any:
        unit, inner, left = run
        return unit, inner, left if takes_part else uint32(0)

    def experts_mlp(
        words: Any, scales: Any, row_scales: Any, bias: Any, down_words: Any, down_scales: Any, down_row_scales: Any,
        down_bias: Any, x: Any, logits: Any, row_live: Any, ids: Any, shares: Any, activated: Any, partials: Any,
        residual: Any, total: Any, count: Any, early: Any, p0: Any, p1: Any, p2: Any, p3: Any, p4: Any, p5: Any,
        p6: Any, p7: Any, p8: Any, p9: Any, p10: Any, limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread, block, blocks = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        up_areas, down_areas = uint32(base + uint32(up_areas_at)), uint32(base + uint32(down_areas_at))
        lists, up_barriers = uint32(base + uint32(lists_at)), uint32(base + uint32(barriers_at))
        down_barriers = uint32(up_barriers + uint32(stages * BARRIER_BYTES))
        if thread == uint32(0):
            begin_up(up_barriers)
            begin_down(down_barriers)
        if early == int64(0):
            ptx.wait_for_previous_kernel()
        route(lists, logits, row_live, count, thread)
        units = list_units(lists, count, thread)
        up_run, down_run = run_of(units, up_tiles, block, blocks), run_of(units, down_tiles, block, blocks)
        if warp < uint32(warps):
            up_run = none_left(up_run, warp < uint32(up_warps))
            down_run = none_left(down_run, warp < uint32(down_warps))
            source_down = down_sources(down_words, down_scales, lane)
            sources = up_sources(words, scales, lane), source_down
            ahead, behind = up_begin(lists, up_run, warp), down_begin(lists, down_run, warp)
            ahead, behind = fill(base, lists, sources, ahead, behind, warp, lane)
            ptx.wait_for_previous_kernel()
            ptx.let_next_kernel_start()
            behind, stage = multiply_up(
                base, up_areas, up_barriers, lists, sources, x, up_run, ahead, behind, uint32(0), warp, lane
            )
            sources = source_down, source_down
            if not overlaps:
                behind, _ = fill_down(base, lists, sources, behind, behind, warp, lane)
                stage = uint32(0)
            multiply_down(
                base, down_areas, down_barriers, lists, sources, activated, down_run, behind, behind, stage, warp, lane
            )
            wait_for_all()
        else:
            ptx.wait_for_previous_kernel()
            ptx.let_next_kernel_start()
            own = uint32(thread - uint32(warps * 32))
            clear_up(lists, activated, count, own)
            clear_down(lists, partials, count, own)
            finish_up(up_areas, up_barriers, lists, (bias, row_scales), activated, up_run, thread, limit, alpha)
            beside = down_bias, down_row_scales
            finish_down(down_areas, down_barriers, lists, beside, partials, down_run, thread, limit, alpha)
            peers = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10)
            sum_rows(partials, residual, total, uint32(count // int64(top_k)), own, peers)
        publish(lists, ids, shares, count, thread)

    return experts_mlp


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Return representative specialisations for a GPU, to compile in tests.

    gpt-oss in MXFP4, 1 and 64 rows; Qwen3-30B-A3B in FP8; an odd shape in bf16; and with a shared expert
    Qwen3-Coder-Next, 1 row, and Qwen3.6-35B-A3B, 4 rows, both in bf16.
    """
    made = []
    cases: tuple[tuple[int, tuple[int, int, int], int, WeightFormat, bool, bool, int], ...] = (
        (64, (5760, 2880, 2880), 4, MXFP4, True, False, 128),
        (1, (5760, 2880, 2880), 4, MXFP4, True, False, 128),
        (4, (1536, 768, 2048), 8, tiled_format("fp8", FP8.tiles(wide=False)), False, False, 128),
        (3, (192, 96, 104), 2, BF16, True, False, 5),
        (1, (1024, 512, 2048), 11, BF16, False, True, 513),
        (4, (1024, 512, 2048), 9, BF16, False, True, 257),
        (128, (1536, 768, 2048), 8, BF16, False, False, 128),
    )
    for rows, (width, inner, hidden), top_k, weight_format, biased, shared, num_experts in examples_for(gpu, cases, 1):
        up = ExpertShape(GATE_UP, width, hidden, top_k, weight_format, biased, biased)
        down = ExpertShape(DOWN, hidden, inner, top_k, weight_format, biased)
        over_all, gpus = not biased and not shared, 2 if biased and rows == 1 else 1
        made.append(_make(plan_mlp(rows, up, down, gpu), num_experts, over_all, gpus, shared))
    return made
