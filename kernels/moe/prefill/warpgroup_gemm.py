"""This module has the grouped GEMMs of experts by warpgroups, for GPUs of capability 9.0 and many rows.

An expert's weights are decoded once for up to 192 of its pairs, whose rows are contiguous, as `arrange_pairs` stores
them. A persistent grid, one block an SM, takes one tile of pairs after another, and all blocks of weight rows of a tile
at about the same time. A pair's bits are those of `grouped_gemm`: the same products in the same order.
"""

from functools import cache, partial
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import SILU
from lowlat.kernels.common.pipeline import make_pipeline
from lowlat.kernels.formats import FP8_BLOCK, MXFP4
from lowlat.kernels.gemm.prefill.activation_layout import STEP, arranged_shape
from lowlat.kernels.gemm.prefill.plan import ALIGNMENT, has_prefill_gemm
from lowlat.kernels.moe.formats import tiled_format
from lowlat.kernels.moe.packing import PackedExperts, check_expert_bias, shape_of
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill.pair_tiles import TILE_WORDS
from lowlat.kernels.moe.prefill.warpgroup_copies import make_copy
from lowlat.kernels.moe.prefill.warpgroup_epilogue import make_gated_finish, make_outputs_finish
from lowlat.kernels.moe.prefill.warpgroup_mainloop import make_multiply
from lowlat.kernels.moe.prefill.warpgroup_plan import (
    COPYING,
    COPYING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARPS,
    WarpgroupPlan,
    plan_warpgroups,
)
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "warpgroup_down", "warpgroup_gate_up"]


def warpgroup_gate_up(
    *,
    arranged: torch.Tensor,
    tiles: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    activation: str = SILU,
    top_k: int,
    gpu: Gpu,
) -> list[KernelCall]:
    """Multiply pairs by gate and up matrices, and apply SwiGLU, in one launch.

    arranged  [K/64, P, 64]  bf16: rows of pairs, as `arrange_pairs` leaves them
    tiles     [n, 4]         int32: tiles of a multiple of 8 pairs, at most 192, as `group_pairs` has them
    weight    [E, 2I, K]     packed in the order of `gate_up_permutation`; I and K multiples of 64
    bias      [E, 2I]        bf16, in the weight's order; None: none
    out       [I/64, P, 64]  bf16, out: activations as `grouped_gate_up` has them, arranged; up to 7 rows after a
                             tile's hold anything, others are not written
    Time: the larger of the chosen experts' bytes over the memory's bandwidth and the tiles' arithmetic over the tensor
    cores' rate. Captured: yes. Raises ShapeError for shapes that do not fit, or a GPU without such instructions.
    """
    places = arranged.shape[1]
    check_shape("out", out, *arranged_shape(places, weight.rows // 2))
    if weight.rows % (2 * STEP):
        raise ShapeError(f"a gate_up matrix by warpgroups has a multiple of {2 * STEP} rows, got {weight.rows}")
    return _calls(GATE_UP, top_k, arranged, tiles, weight, bias, out, limit, alpha, gpu, activation)


def warpgroup_down(
    *,
    arranged: torch.Tensor,
    tiles: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    top_k: int,
    gpu: Gpu,
) -> list[KernelCall]:
    """Multiply pairs by down matrices, in one launch.

    arranged, tiles              as `warpgroup_gate_up` leaves and takes them
    weight           [E, N, I]   packed, N a multiple of 16
    bias             [E, N]      bf16; None: none
    out              [P, N]      float32, out: down @ activated + bias, not yet times the shares; rows as above
    Time, errors: as `warpgroup_gate_up`. Captured: yes.
    """
    check_shape("out", out, arranged.shape[1], weight.rows)
    if weight.rows % 16:
        raise ShapeError(f"a down matrix by warpgroups has a multiple of 16 rows, got {weight.rows}")
    return _calls(DOWN, top_k, arranged, tiles, weight, bias, out, None, None, gpu)


def _calls(
    kind: str,
    top_k: int,
    arranged: torch.Tensor,
    tiles: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    limit: float | None,
    alpha: float | None,
    gpu: Gpu,
    activation: str = SILU,
) -> list[KernelCall]:
    if not has_prefill_gemm(gpu):
        raise ShapeError(f"GEMMs by warpgroups are for GPUs of capability 9.0, not {gpu.capability}")
    places = arranged.shape[1]
    check_shape("arranged", arranged, *arranged_shape(places, weight.columns))
    check_shape("tiles", tiles, tiles.shape[0], TILE_WORDS)
    check_expert_bias(bias, weight)
    if weight.columns % STEP:
        raise ShapeError(f"experts' columns must be a multiple of {STEP}, got {weight.columns}")
    clamped = kind == DOWN or limit is not None
    shape = shape_of(kind, weight, top_k, biased=bias is not None, clamped=clamped, activation=activation)
    plan, most = plan_warpgroups(shape, gpu), tiles.shape[0]
    arguments = (*weight.arguments, arranged, tiles, most, 0 if bias is None else bias, out, places)
    grid = (min(gpu.num_multiprocessors, most * plan.row_blocks(shape)), 1, 1)
    return [KernelCall(_make(shape, plan), grid, (*arguments, limit or 0.0, alpha or 0.0))]


@cache
def _make(shape: ExpertShape, plan: WarpgroupPlan) -> Kernel:
    """Grid: as many blocks as the GPU has SMs."""
    pipeline = make_pipeline(plan.stages, COPYING, WARPS, suspends=True)
    make_finish = partial(make_gated_finish if shape.kind == GATE_UP else make_outputs_finish, shape)
    copy_all, multiply_all = make_copy(shape, plan, pipeline), make_multiply(shape, plan, pipeline, make_finish)
    begin = pipeline.begin
    give, take = ptx_hopper.give_registers(COPYING_REGISTERS), ptx_hopper.take_registers(MULTIPLYING_REGISTERS)
    barriers_at, step_row_bytes = plan.stages * plan.stage_bytes, 2 * STEP

    @device_function
    def begin_block(thread: Any) -> Any:
        """Where the stages and their barriers are."""
        start = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        base = uint32(uint32(start + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - ALIGNMENT + 1))
        barriers = uint32(base + uint32(barriers_at))
        if thread == uint32(0):
            begin(barriers)
            ptx_hopper.fence_barriers()
        cuda.syncthreads()
        return base, barriers

    def experts_by_warpgroups(
        weight: Any, scales: Any, row_scales: Any, x: Any, tiles: Any, num_tiles: Any, bias: Any, out: Any,
        places: Any, limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        thread, unit = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        place = begin_block(thread)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        given = (
            weight, scales, x, tiles, uint32(num_tiles), int64(places) * int64(step_row_bytes), uint32(cuda.gridDim.x),
        )  # fmt: skip
        if warp >= uint32(WARPS):
            give()
            copy_all(place, given, unit, uint32(warp - uint32(WARPS)), lane)
        else:
            take()
            multiply_all(place, given, (bias, row_scales, limit, alpha, int64(places)), out, unit, warp, lane)

    name = f"experts_warpgroups_{shape.kind}_{shape.rows}x{shape.columns}_{shape.label}_{plan.stages}"
    signature = (*(types.int64,) * 9, types.float32, types.float32)
    return Kernel(
        name, experts_by_warpgroups, signature, plan.threads, 1, plan.shared_bytes, specific=True, whole=True
    )  # fmt: skip


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Representative specialisations, for a GPU that has the instructions: gpt-oss in MXFP4, FP8 by blocks."""
    if not has_prefill_gemm(gpu):
        return []
    blocks = tiled_format("fp8_block", FP8_BLOCK.tiles(wide=True))
    shapes = (ExpertShape(GATE_UP, 5760, 2880, 4, MXFP4), ExpertShape(DOWN, 2048, 768, 8, blocks, biased=False))
    return [_make(shape, plan_warpgroups(shape, gpu)) for shape in shapes]
