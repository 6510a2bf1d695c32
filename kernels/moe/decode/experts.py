"""This module runs each GEMM of an MoE layer in a launch of its own, for few rows whose experts are given.

`mlp` runs both in one launch, between top-k routing and the residual sum. The launches here are made of the same device
functions and have the same bits, since the partition of K depends on the weight's shape alone. No block waits for
another, so no buffer must be filled beforehand.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import GELU_TANH, SILU
from lowlat.kernels.common.pipeline import make_pipeline
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.formats import BF16, MXFP4
from lowlat.kernels.formats.int4 import int4_format
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.moe.decode.expert_list import make_list_units
from lowlat.kernels.moe.decode.gemm import (
    make_finishing,
    make_multiplying,
    make_prefetching,
    nothing_prefetched,
    run_of,
)
from lowlat.kernels.moe.decode.swiglu_epilogue import make_swiglu
from lowlat.kernels.moe.decode.topk_parts import add_topk_parts
from lowlat.kernels.moe.decode.weighing_epilogue import make_weighing
from lowlat.kernels.moe.formats import tiled_format
from lowlat.kernels.moe.packing import PackedExperts, check_expert_bias, shape_of
from lowlat.kernels.moe.plan import (
    DOWN,
    GATE_UP,
    MAX_PARTS,
    ExpertPlan,
    ExpertShape,
    choose_expert_plan,
    partials_workspace,
    parts_of,
    plan_experts,
)
from lowlat.kernels.moe.topk_sum import add_topk
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Argument, Gpu, Kernel, KernelCall, Workspace, examples_for
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "experts_down", "experts_gate_up"]


def experts_gate_up(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    experts: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    activation: str = SILU,
    many: bool = False,
    gpu: Gpu = H200,
    plan: ExpertPlan | None = None,
) -> list[KernelCall]:
    """Multiply rows by the gate and up matrices of their experts, and apply SwiGLU.

    x           [M, K]      bf16; with MXFP4 magnitudes below 2**64
    expert_ids  [M, k]      int32  -1 dead
    experts     [E, 2I, K]  packed in the order of `gate_up_permutation`
    bias        [E, 2I]     bf16, in the weight's order; None: none
    out         [M, k, I]   bf16, out: (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up within
                            +-`limit`, or without them up * gate * sigmoid(gate); in float32, rounded once; zero where
                            dead
    activation  "silu", or "gelu_tanh" without a limit: up * gelu(gate)
    gpu         the GPU that it runs on
    plan        the GEMM's plan; None: that of the GPU's table, or of `plan_experts`
    many        launches have more rows, see `parts_of`; no bit changes
    There is a launch for every `rows_a_launch` rows. Time: the distinct experts' bytes over the memory's bandwidth.
    Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    check_shape("x", x, expert_ids.shape[0], experts.columns)
    check_shape("out", out, *expert_ids.shape, experts.rows // 2)
    check_dtype(torch.bfloat16, x=x, out=out)
    if experts.rows % 16:
        raise ShapeError(f"experts_gate_up: a matrix must have a multiple of 16 rows, got {experts.rows}")
    return _calls(
        GATE_UP, x, expert_ids, None, experts, bias, out, limit, alpha, gpu, plan, activation=activation, many=many
    )


def experts_down(
    activated: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    experts: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    workspace: Workspace,
    parts: KParts | None = None,
    many: bool = False,
    gpu: Gpu = H200,
    plan: ExpertPlan | None = None,
) -> list[KernelCall]:
    """Multiply activations by the down matrices of their experts, and add up each row's weighted outputs.

    activated       [M, k, I]  bf16; with MXFP4 magnitudes below 2**64; dead pairs' are not read
    expert_ids      [M, k]     int32    -1 dead
    expert_weights  [M, k]     float32
    experts         [E, N, I]  packed
    bias            [E, N]     bf16; None: none
    out             [M, N]     float32, out: the sum from a row's first expert to its last of weight * (down @ activated
                               + bias), every product and sum rounded by itself; zero for a dead row
    workspace       gives the memory of `partials_workspace`
    parts           of I: each gives such a sum, the first with the bias, and they are added as by `cuts.tree_sum`
    many, gpu, plan, time and errors are as in `experts_gate_up`; there is one launch more, for the sums.
    """
    rows, top_k = expert_ids.shape
    check_shape("activated", activated, rows, top_k, experts.columns)
    check_shape("expert_weights", expert_weights, rows, top_k)
    check_shape("out", out, rows, experts.rows)
    check_dtype(torch.bfloat16, activated=activated)
    check_dtype(torch.float32, expert_weights=expert_weights, out=out)
    if experts.rows % 4:
        raise ShapeError(f"experts_down: a matrix must have a multiple of 4 rows, got {experts.rows}")
    if parts is not None and (experts.columns % 64 or parts.count not in (1, 2, 4, MAX_PARTS)):
        raise ShapeError(
            f"experts_down: K is summed in 1, 2, 4 or {MAX_PARTS} parts of whole steps of 64 columns, not "
            f"{experts.columns} in {parts.count}"
        )
    partials = workspace(*partials_workspace(rows, top_k, experts.rows, parts))
    beside = (None, None, gpu, plan, parts)
    calls = _calls(DOWN, activated, expert_ids, expert_weights, experts, bias, partials, *beside, many=many)
    if parts is None:
        return calls + add_topk(partials=partials, expert_ids=expert_ids, out=out)
    return calls + add_topk_parts(partials=partials, parts=parts.count, expert_ids=expert_ids, out=out)


def _calls(
    kind: str,
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor | None,
    experts: PackedExperts,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    limit: float | None,
    alpha: float | None,
    gpu: Gpu,
    plan: ExpertPlan | None,
    parts: KParts | None = None,
    activation: str = SILU,
    many: bool = False,
) -> list[KernelCall]:
    rows, top_k = ids.shape
    check_expert_bias(bias, experts)
    check_dtype(torch.int32, expert_ids=ids)
    if experts.columns % 8:
        raise ShapeError(f"experts' columns must be a multiple of 8, got {experts.columns}")
    clamped = kind == DOWN or limit is not None
    shape = shape_of(kind, experts, top_k, biased=bias is not None, clamped=clamped, parts=parts, activation=activation)
    calls = []
    for part, count in parts_of(rows, top_k, many=many):
        cut, planned = (plan, None) if plan else choose_expert_plan(count, shape, gpu, experts.num_experts)
        own: Argument = 0 if shares is None else shares[part]
        addresses = (*experts.arguments, 0 if bias is None else bias, x[part], ids[part], own, out[part])
        arguments = (*addresses, count * top_k, limit or 0.0, alpha or 0.0)
        calls.append(KernelCall(_make(shape, cut), (cut.num_blocks, 1, 1), arguments, planned=planned))
    return calls


@cache
def _make(shape: ExpertShape, plan: ExpertPlan) -> Kernel:
    name = (
        f"experts_gemm_{shape.kind}_{shape.rows}x{shape.columns}x{shape.top_k}_"
        f"{shape.label}_{plan.columns}x{plan.capacity}x{plan.warps}x{plan.finishing}"
        f"x{plan.part}x{plan.stages}{'_pairs' if plan.together > 1 else ''}{'' if plan.suspends else '_awake'}"
    )
    signature = (*(types.int64,) * 9, types.float32, types.float32)
    return Kernel(name, _kernel(shape, plan), signature, plan.threads, 1, plan.shared_bytes(shape), most_blocks=1)


def _kernel(shape: ExpertShape, plan: ExpertPlan) -> Callable[..., None]:
    tiles, warps, stage_bytes = shape.tiles // plan.sets, plan.warps, plan.stage_bytes(shape)
    areas_at = warps * plan.ring_bytes(shape)
    lists_at = areas_at + plan.stages * plan.area_bytes
    barriers_at = lists_at + plan.list_bytes
    pipeline = make_pipeline(plan.stages, warps, plan.finishing, suspends=plan.suspends)
    sources_of, begin_run, _ = make_prefetching(shape, plan)
    fill, multiply_run = make_multiplying(shape, plan, pipeline, stage_bytes, nothing_prefetched)
    epilogue = make_swiglu(shape, plan) if shape.kind == GATE_UP else make_weighing(shape, plan)
    finish_run = make_finishing(shape, plan, epilogue, pipeline, warps * 32)
    load_routing, list_units, clear = (
        _make_load_routing(shape, plan),
        make_list_units(plan, shape.top_k),
        epilogue.clear,
    )
    begin_pipeline, wait_for_all = pipeline.begin, ptx.copies_wait(0)

    def experts_gemm(
        words: Any, scales: Any, row_scales: Any, bias: Any, x: Any, ids: Any, shares: Any, out: Any, count: Any,
        limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread, block, blocks = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        areas, lists = uint32(base + uint32(areas_at)), uint32(base + uint32(lists_at))
        barriers = uint32(base + uint32(barriers_at))
        if thread == uint32(0):
            begin_pipeline(barriers)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        load_routing(lists, ids, shares, count, thread)
        units = list_units(lists, count, thread)
        run = run_of(units, tiles, block, blocks)
        if warp < uint32(warps):
            source = sources_of(words, scales, lane)
            ahead = begin_run(lists, run, warp)
            ahead, behind = fill(base, lists, (source, source), ahead, ahead, warp, lane)
            multiply_run(base, areas, barriers, lists, (source, source), x, run, ahead, behind, uint32(0), warp, lane)
            wait_for_all()
        else:
            clear(lists, out, count, uint32(thread - uint32(warps * 32)))
            finish_run(areas, barriers, lists, (bias, row_scales), out, run, thread, limit, alpha)

    return experts_gemm


def _make_load_routing(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A device function of all threads that copies `count` pairs' ids, and weights if used, to lists; one barrier."""
    shares_at, weighs, turns, threads = plan.shares_at, shape.kind == DOWN, plan.turns, plan.threads

    @device_function
    def load_routing(lists: Any, ids: Any, shares: Any, count: Any, thread: Any) -> None:
        if int64(thread) < count:
            at, own = int64(thread) * int64(4), uint32(lists + thread * uint32(4))
            ptx.store_shared_u32(own, uint32(ptx.load_global_i32(ids + at)))
            if weighs:
                ptx.store_shared_f32(own + uint32(shares_at), ptx.load_global_f32(shares + at))
        cuda.syncthreads()

    @device_function
    def load_in_turns(lists: Any, ids: Any, shares: Any, count: Any, thread: Any) -> None:
        for turn in range(turns):
            load_routing(lists, ids, shares, count, uint32(thread + uint32(turn * threads)))

    return load_routing if turns == 1 else load_in_turns


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Return representative specialisations for a GPU, to compile in tests.

    Both GEMMs of gpt-oss in MXFP4; odd shapes in bf16 and in INT4 with two groups a step; four rows with more pairs
    than a warp has lanes.
    """
    grouped = tiled_format("int4_32_zeros", int4_format(32, has_zeros=True).tiles(wide=True))
    cases = (
        (1, ExpertShape(GATE_UP, 5760, 2880, 4, MXFP4)),
        (64, ExpertShape(DOWN, 2880, 2880, 4, MXFP4)),
        (4, ExpertShape(GATE_UP, 192, 104, 2, BF16)),
        (3, ExpertShape(DOWN, 100, 224, 1, grouped, biased=False)),
        (4, ExpertShape(DOWN, 2880, 2880, 4, MXFP4, parts=KParts(8, 1))),
        (1, ExpertShape(DOWN, 2048, 192, 8, BF16, biased=False, parts=KParts(2, 1))),
        (4, ExpertShape(GATE_UP, 1024, 2048, 9, BF16, biased=False, clamped=False)),
        (1, ExpertShape(GATE_UP, 1408, 2816, 8, BF16, biased=False, clamped=False, activation=GELU_TANH)),
        (128, ExpertShape(DOWN, 2880, 2880, 4, MXFP4)),
    )
    return [_make(shape, plan_experts(rows, shape, gpu)) for rows, shape in examples_for(gpu, cases, 2)]
