"""GEMMs of many rows with a packed bf16 weight by warpgroups' tensor cores, for cards of capability 9.0.

The weight's tiles are the first matrix, in registers, as they were packed; rows of x, arranged once, are the second one
in shared memory. A persistent grid, one block a multiprocessor. A row's bits depend on the row and the weight alone.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.handover import Handover, make_handover
from lowlat.kernels.gemm.packing import RUN, PackedMatrix
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.gemm.prefill.large_tile import make_multiply
from lowlat.kernels.gemm.prefill.mainloop import Cut, make_consume, make_finish, make_produce
from lowlat.kernels.gemm.prefill.plan import (
    ALIGNMENT,
    CONSUMERS,
    PrefillGemmPlan,
    choose_prefill_plan,
    has_prefill_gemm,
    partials_shape,
    plan_prefill_gemm,
    plans_of,
    segments_of,
)
from lowlat.kernels.gemm.prefill.split_k_sum import add_segments
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.kernel import H200, Card, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, types, uint32
from lowlat.kernels.toolchain.ptx_hopper import KEPT_AS_USUAL, READ_ONCE
from lowlat.kernels.tuning.table import Planned

__all__ = ["examples", "prefill_gemm"]


def prefill_gemm(
    *,
    x: torch.Tensor,
    weight: PackedMatrix,
    bias: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    arranged: torch.Tensor,
    partials: torch.Tensor | None = None,
    out: torch.Tensor,
    card: Card,
    plan: PrefillGemmPlan | None = None,
) -> list[KernelCall]:
    """out = x @ weight.T + bias, in two or three launches, accumulated in float32.

    x         [M, K]              bf16, M a multiple of 64 up to 1024
    weight    [N, K]              packed bf16, N and K multiples of 8
    bias      [N]                 bf16, in the packed order, or None
    columns   [N / 8]             int32, as `runs_of` the weight's order has it; None: rows are packed in their order
    arranged  [ceil(K/64), M, 64] bf16: workspace, as `arranged_shape` has it
    partials  [S, M, N]           float32: workspace, as `partials_shape` has it; None where S is 0
    out       [M, N]              float32, out
    plan      one of `plans_of`: no bit depends on it; None: by the card's table, or `plan_prefill_gemm`'s
    Time: the largest of the weight's bytes over the memory's bandwidth, what blocks read over the L2's, and 2 M N K
    operations over the tensor cores' rate. Captured: yes.
    Raises ShapeError for shapes that do not fit, or a card without such instructions.
    """
    rows, depth = x.shape
    planned: Planned | None = None
    if plan is None:
        plan, planned = choose_prefill_plan(rows, weight.rows, weight.columns, card)
    elif plan not in plans_of(rows, weight.rows, weight.columns, card):
        raise ShapeError(f"{plan} is no plan for {rows} rows by a weight of {weight.rows} x {weight.columns}")
    check_shape("x", x, rows, weight.columns)
    check_shape("out", out, rows, weight.rows)
    check_shape("arranged", arranged, *arranged_shape(rows, depth))
    if weight.tiles.dtype != torch.bfloat16 or x.dtype != torch.bfloat16:
        raise ShapeError(f"a prefill GEMM is of bf16, got {x.dtype} and {weight.tiles.dtype}")
    if bias is not None:
        check_shape("bias", bias, weight.rows)
    if columns is not None:
        check_shape("columns", columns, weight.rows // RUN)
    segments, length = segments_of(weight.rows, weight.columns)
    cut, x_tiles = Cut(weight.rows, weight.columns, segments, length), rows // plan.rows
    units = plan.units(rows, weight.rows, segments)
    kernel = _make(cut, plan, bias is not None, columns is not None)
    target = out
    if plan.apart:
        if partials is None:
            raise ShapeError("segments that are apart need a workspace `partials`")
        check_shape("partials", partials, *partials_shape(plan, rows, weight.rows, weight.columns))
        target = partials
    arguments = (
        weight.tiles, arranged, 0 if bias is None else bias, 0 if columns is None else columns, target, rows, x_tiles,
        units, READ_ONCE if x_tiles == 1 else KEPT_AS_USUAL,
    )  # fmt: skip
    calls = arrange(x=x, out=arranged)
    calls.append(KernelCall(kernel, (min(units, card.num_multiprocessors), 1, 1), arguments, planned=planned))
    if plan.apart:
        calls += add_segments(partials=target, bias=bias, columns=columns, out=out)
    return calls


@cache
def _make(cut: Cut, plan: PrefillGemmPlan, with_bias: bool, with_columns: bool) -> Kernel:
    """Grid: as many blocks as the card has multiprocessors, or units where those are fewer."""
    handover = make_handover(plan.stages, plan.producers, 4 * CONSUMERS, suspends=True)
    finish, begin = make_finish(cut, plan, with_bias, with_columns), handover.begin
    barriers_at = plan.stages * plan.stage_bytes

    @device_function
    def begin_block(thread: Any) -> Any:
        """Where the stages and their barriers are."""
        start = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        base = uint32(uint32(start + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - ALIGNMENT + 1))
        barriers = uint32(base + uint32(barriers_at))
        ptx.let_next_kernel_start()
        if thread == uint32(0):
            begin(barriers)
            ptx_hopper.fence_barriers()
        cuda.syncthreads()
        return base, barriers

    make = _make_large if plan.is_large else _make_divided
    kernel = make(cut, plan, handover, finish, begin_block)
    name = (
        f"prefill_gemm_{cut.weight_rows}x{cut.columns}_{cut.segments}x{cut.length}_"
        f"{plan.rows}x{plan.depth}x{plan.stages}_{'apart' if plan.apart else 'whole'}_"
        f"{'bias' if with_bias else 'plain'}_{'columns' if with_columns else 'inplace'}"
    )
    return Kernel(name, kernel, (types.int64,) * 9, plan.threads, 1, plan.shared_bytes, specific=True)


def _make_divided(cut: Cut, plan: PrefillGemmPlan, handover: Handover, finish: Any, begin_block: Any) -> Any:
    """Warps that copy beside warps that multiply."""
    produce, consume = make_produce(cut, plan, handover), make_consume(cut, plan, handover, finish)
    last_warp = 4 * CONSUMERS

    def prefill_gemm_kernel(
        weight: Any, x: Any, bias: Any, columns: Any, out: Any, rows: Any, x_tiles: Any, units: Any, policy: Any
    ) -> None:
        thread, unit, grid = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        base, barriers = begin_block(thread)
        if warp >= uint32(last_warp):
            part = uint32(warp - uint32(last_warp))
            produce(
                base, barriers, weight, x, uint32(rows), uint32(x_tiles), uint32(units), unit, grid, part, lane, policy
            )  # fmt: skip
        else:
            beside = (bias, columns)
            consume(
                base, barriers, beside, out, uint32(rows), uint32(x_tiles), uint32(units), unit, grid, warp, lane
            )  # fmt: skip

    return prefill_gemm_kernel


def _make_large(cut: Cut, plan: PrefillGemmPlan, handover: Handover, finish: Any, begin_block: Any) -> Any:
    """Warps that multiply and copy."""
    multiply_all = make_multiply(cut, plan, handover, finish)

    def prefill_gemm_kernel(
        weight: Any, x: Any, bias: Any, columns: Any, out: Any, rows: Any, x_tiles: Any, units: Any, policy: Any
    ) -> None:
        thread, unit, grid = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        given = (weight, x, uint32(rows), uint32(x_tiles), uint32(units), grid, policy)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        multiply_all(begin_block(thread), given, (bias, columns), out, unit, warp, lane)

    return prefill_gemm_kernel


def examples(card: Card = H200) -> list[Kernel]:
    """Representative specialisations, for a card that has the instructions: Llama's GEMMs, and an odd one."""
    if not has_prefill_gemm(card):
        return []
    cases = (
        (128, 6144, 4096, False, True),
        (512, 4096, 4096, False, False),
        (512, 28672, 4096, False, True),
        (128, 4096, 14336, False, False),
        (64, 200, 72, True, True),
    )
    made = []
    for rows, weight_rows, columns, with_bias, with_columns in cases:
        plan = plan_prefill_gemm(rows, weight_rows, columns, card)
        cut = Cut(weight_rows, columns, *segments_of(weight_rows, columns))
        made.append(_make(cut, plan, with_bias, with_columns))
    return made
