"""This module multiplies many rows by a packed weight on warpgroups' tensor cores, for GPUs of capability 9.0.

The weight's tiles are the first matrix, in registers, as they were packed or decoded there. Rows of x, arranged once,
are the second one, in shared memory. The grid is persistent, one block an SM. A row's bits depend on the row and the
weight alone.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import GELU_TANH, SILU, activation_label
from lowlat.kernels.common.pipeline import make_pipeline
from lowlat.kernels.formats import FP8, representative_layouts
from lowlat.kernels.formats.int4 import int4_format
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import RUN, TILE_ROWS, PackedMatrix
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.gemm.prefill.coded_rows import CODED_STEP, CodedRows, by_codes
from lowlat.kernels.gemm.prefill.gated_epilogue import make_gated_finish
from lowlat.kernels.gemm.prefill.gated_split_k_sum import gate_segments
from lowlat.kernels.gemm.prefill.mainloop import Cut, make_consume, make_finish, make_produce
from lowlat.kernels.gemm.prefill.parts_sum import add_parts
from lowlat.kernels.gemm.prefill.plan import (
    ALIGNMENT,
    CONSUMERS,
    COPYING_REGISTERS,
    MULTIPLYING_REGISTERS,
    PRODUCERS,
    STEP,
    STEP_ROW_BYTES,
    PrefillGemmPlan,
    choose_prefill_plan,
    cut_of,
    has_prefill_gemm,
    partials_shape,
    plan_prefill_gemm,
    plans_of,
)
from lowlat.kernels.gemm.prefill.split_k_sum import add_segments
from lowlat.kernels.gemm.tiles import BF16_TILES, CODED_ROWS_TILES
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32
from lowlat.kernels.toolchain.ptx_hopper import KEPT_AS_USUAL, READ_ONCE
from lowlat.kernels.tuning.table import Planned

__all__ = ["arranged_prefill_gemm", "examples", "gated_prefill_gemm", "gates", "prefill_gemm"]


@dataclass(frozen=True)
class Beside:
    """The parts of a GEMM's epilogue: a bias, the columns of the output, gates and ups and their activation."""

    bias: bool
    columns: bool
    gated: bool = False
    activation: str = SILU

    @property
    def name(self) -> str:
        """Its part of a kernel's name."""
        kind = "gated" if self.gated else "columns" if self.columns else "inplace"
        return f"{'bias' if self.bias else 'plain'}_{kind}{activation_label(self.activation)}"


def prefill_gemm(
    *,
    x: torch.Tensor,
    weight: PackedMatrix,
    bias: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    arranged: torch.Tensor,
    partials: torch.Tensor | None = None,
    out: torch.Tensor,
    gpu: Gpu,
    parts: KParts | None = None,
    plan: PrefillGemmPlan | None = None,
) -> list[KernelCall]:
    """out = x @ weight.T + bias, in two or three launches, accumulated in float32.

    x         [M, K]              bf16, M a multiple of 64 up to 4096
    arranged  [ceil(K/64), M, 64] bf16: workspace, as `arranged_shape` has it
    Everything else as `arranged_prefill_gemm` has it, of which this is one after `arrange`.
    """
    check_shape("x", x, out.shape[0], weight.columns)
    if x.dtype != torch.bfloat16:
        raise ShapeError(f"a prefill GEMM is of bf16, got x {x.dtype}")
    product = arranged_prefill_gemm(
        arranged=arranged, weight=weight, bias=bias, columns=columns, partials=partials, out=out, gpu=gpu,
        parts=parts, plan=plan,
    )  # fmt: skip
    return arrange(x=x, out=arranged) + product


def arranged_prefill_gemm(
    *,
    arranged: torch.Tensor | CodedRows,
    weight: PackedMatrix,
    bias: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    out: torch.Tensor,
    gpu: Gpu,
    parts: KParts | None = None,
    plan: PrefillGemmPlan | None = None,
) -> list[KernelCall]:
    """out = x @ weight.T + bias of rows that are arranged, in one or two launches, accumulated in float32.

    arranged  [ceil(K/64), M, 64] bf16: x as `arrange` leaves it, M a multiple of 64 up to 4096; or its codes, by which
                                  FP8 by row is multiplied: scales of rows of the weight, then of x, multiply the sums
    weight    [N, K]              packed, N and K multiples of 8; bf16, or quantised: numbers are rounded to bf16, and
                                  scales of rows multiply the sums
    bias      [N]                 bf16, in the packed order, or None
    columns   [N / 8]             int32, as `runs_of` the weight's order has it; None: rows are packed in their order
    partials  [S, M, N]           float32: workspace, as `partials_shape` has it; None where S is 0
    out       [M, N]              float32, out
    parts     of K: each is summed by itself, scaled, the first has the bias, and they are added as `cuts.tree_sum`
              does; of several M is at most 1024. None: K is cut by N and K
    plan      one of `plans_of`: no bit depends on it; None: by the GPU's table, or `plan_prefill_gemm`'s
    Time: the largest of the weight's bytes over the memory's bandwidth, what blocks read over the L2's, and 2 M N K
    operations over the tensor cores' rate. Captured: yes.
    Raises ShapeError for shapes that do not fit, or a GPU without such instructions.
    """
    rows, weight = out.shape[0], _as_multiplied(weight, arranged, parts)
    plan, planned = _chosen(rows, weight, gpu, plan, parts)
    check_shape("out", out, rows, weight.rows)
    if bias is not None:
        check_shape("bias", bias, weight.rows)
    if columns is not None:
        check_shape("columns", columns, weight.rows // RUN)
    target = _sums_of(partials, plan, rows, weight, parts) if plan.apart else out
    cut = _cut_of(weight, parts)
    kernel = _make(cut, plan, Beside(bias is not None, columns is not None))
    calls = [_call(kernel, plan, planned, weight, arranged, (bias, columns), target, rows, gpu, cut.segments)]
    if plan.apart and cut.parts is not None:
        calls += add_parts(
            partials=target, parts=cut.parts, steps=cut.steps, scales=weight.scales, bias=bias, columns=columns, out=out
        )
    elif plan.apart:
        calls += add_segments(
            partials=target, scales=weight.scales, row_scales=_row_scales(arranged), bias=bias, columns=columns, out=out
        )
    return calls


def gated_prefill_gemm(
    *,
    arranged: torch.Tensor | CodedRows,
    weight: PackedMatrix,
    bias: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    out: torch.Tensor,
    activation: str = SILU,
    gpu: Gpu,
    parts: KParts | None = None,
    plan: PrefillGemmPlan | None = None,
) -> list[KernelCall]:
    """silu(gate) * up of x @ weight.T + bias, or another activation's, arranged; dead rows are zero.

    In one launch, whose epilogue activates; in two where segments of K are apart: the one that adds them up activates.

    arranged  [ceil(K/64), M, 64]  bf16: x as `arrange` leaves it, or its codes, M a multiple of 64 up to 4096
    weight    [2I, K]              packed in the order of `gate_up_permutation`, as `arranged_prefill_gemm` takes it
    bias      [2I]                 bf16, in the packed order, or None
    row_live  [M]                  uint8; None: all rows are live
    partials  [S, M, 2I]           float32: workspace, as `partials_shape` has it; None where S is 0
    out       [ceil(I/64), M, 64]  bf16, out: the bits of `silu_mul` over `arranged_prefill_gemm`'s, as `arrange` leaves
                                   them
    parts, plan, time, errors: as `arranged_prefill_gemm`; ShapeError too where `gates` denies the weight or the parts.
    """
    rows = arranged.rows if isinstance(arranged, CodedRows) else arranged.shape[1]
    weight = _as_multiplied(weight, arranged, parts)
    plan, planned = _chosen(rows, weight, gpu, plan, parts)
    num_parts = 1 if parts is None else parts.count
    if not gates(weight.rows, num_parts):
        raise ShapeError(
            f"gates and ups are a multiple of {TILE_ROWS} weight rows, whose K is summed in one part, "
            f"not {weight.rows} in {num_parts}"
        )
    check_shape("out", out, *arranged_shape(rows, weight.rows // 2))
    if bias is not None:
        check_shape("bias", bias, weight.rows)
    if row_live is not None:
        check_shape("row_live", row_live, rows)
    cut = _cut_of(weight, parts)
    if not plan.apart:
        kernel = _make(cut, plan, Beside(bias is not None, False, True, activation))
        return [_call(kernel, plan, planned, weight, arranged, (bias, row_live), out, rows, gpu, cut.segments)]
    sums = _sums_of(partials, plan, rows, weight, parts)
    kernel = _make(cut, plan, Beside(False, False))
    return [
        _call(kernel, plan, planned, weight, arranged, (None, None), sums, rows, gpu, cut.segments),
        *gate_segments(
            partials=sums, scales=weight.scales, row_scales=_row_scales(arranged), bias=bias, row_live=row_live,
            out=out, activation=activation,
        ),
    ]  # fmt: skip


def gates(weight_rows: int, num_parts: int = 1) -> bool:
    """Whether `gated_prefill_gemm` takes so many weight rows: whole tiles of gates and ups, and K summed in one part.

    Segments are no parts: it adds them up.
    """
    return weight_rows % TILE_ROWS == 0 and num_parts == 1


def _sums_of(
    partials: torch.Tensor | None, plan: PrefillGemmPlan, rows: int, weight: PackedMatrix, parts: KParts | None
) -> torch.Tensor:
    """The workspace of segments' sums. Raises ShapeError where there is none, or one of another shape."""
    if partials is None:
        raise ShapeError("segments that are apart need a workspace `partials`")
    check_shape("partials", partials, *partials_shape(plan, rows, weight.rows, weight.columns, parts))
    return partials


def _row_scales(x: torch.Tensor | CodedRows) -> torch.Tensor | None:
    """The scales of rows that are codes."""
    return x.scales if isinstance(x, CodedRows) else None


def _as_multiplied(weight: PackedMatrix, x: torch.Tensor | CodedRows, parts: KParts | None) -> PackedMatrix:
    """A weight as rows of bf16, or codes of rows, are multiplied by it. Raises ShapeError for codes in parts of K."""
    if not isinstance(x, CodedRows):
        return weight
    if parts is not None and parts.count > 1:
        raise ShapeError(f"codes of rows are multiplied in one part of K, not in {parts.count}")
    return by_codes(weight)


def _chosen(
    rows: int, weight: PackedMatrix, gpu: Gpu, plan: PrefillGemmPlan | None, parts: KParts | None
) -> tuple[PrefillGemmPlan, Planned | None]:
    """The plan, and its place in tables where it was not given. Raises ShapeError for parts without whole steps."""
    if parts is not None and parts.count > 1 and weight.columns % STEP:
        raise ShapeError(f"parts of K are whole steps of {STEP} columns, which {weight.columns} are not")
    if plan is None:
        return choose_prefill_plan(rows, weight.rows, weight.columns, gpu, weight.tile_format, parts)
    if plan not in plans_of(rows, weight.rows, weight.columns, gpu, weight.tile_format, parts):
        raise ShapeError(f"{plan} is no plan for {rows} rows by a weight of {weight.rows} x {weight.columns}")
    return plan, None


def _cut_of(weight: PackedMatrix, parts: KParts | None) -> Cut:
    sizes = cut_of(weight.rows, weight.columns, parts)
    return Cut(weight.rows, weight.columns, *sizes, weight.tile_format, parts if sizes[0] > 1 else None)


def _call(
    kernel: Kernel,
    plan: PrefillGemmPlan,
    planned: Planned | None,
    weight: PackedMatrix,
    x: torch.Tensor | CodedRows,
    beside: tuple[torch.Tensor | None, torch.Tensor | None],
    target: torch.Tensor,
    rows: int,
    gpu: Gpu,
    segments: int,
) -> KernelCall:
    """The launch of a GEMM's own kernel."""
    arranged = x.memory if isinstance(x, CodedRows) else x
    if isinstance(x, CodedRows):
        check_shape("codes", x.codes, 2 * weight.columns // CODED_STEP, rows, CODED_STEP)
    else:
        check_shape("arranged", x, *arranged_shape(rows, weight.columns))
        is_plain = weight.tile_format == BF16_TILES
        if (is_plain and weight.tiles.dtype != torch.bfloat16) or x.dtype != torch.bfloat16:
            raise ShapeError(f"a prefill GEMM is of bf16, got {x.dtype} and {weight.tiles.dtype}")
    x_tiles = rows // plan.rows
    units, cluster = plan.units(rows, weight.rows, segments), plan.cluster
    addresses = tuple(0 if each is None else each for each in (*beside, weight.scales))
    policy = READ_ONCE if x_tiles == 1 else KEPT_AS_USUAL
    arguments = (weight.memory, arranged, *addresses, target, rows, x_tiles, units, policy)
    blocks = cluster * min(units, gpu.num_multiprocessors // cluster)
    return KernelCall(kernel, (blocks, 1, 1), arguments, planned=planned)


def _make_beside_of(cut: Cut) -> Any:
    """A function: the addresses next to the product, of which codes of rows have one more: of scales after them."""
    row_bytes = cut.steps * STEP_ROW_BYTES

    if cut.weights.by_codes:

        @device_function
        def with_scales(bias: Any, columns: Any, scales: Any, x: Any, rows: Any) -> Any:
            return bias, columns, scales, x + int64(rows) * int64(row_bytes)

        return with_scales

    @device_function
    def plain(bias: Any, columns: Any, scales: Any, _x: Any, _rows: Any) -> Any:
        return bias, columns, scales

    return plain


@cache
def _make(cut: Cut, plan: PrefillGemmPlan, beside: Beside) -> Kernel:
    """Grid: as many blocks as the GPU has SMs, or fewer where there are fewer units."""
    pipeline = make_pipeline(plan.stages, PRODUCERS, 4 * CONSUMERS, suspends=True, cluster=plan.cluster)
    if beside.gated:
        finish = make_gated_finish(cut, plan, beside.bias, beside.activation)
    else:
        finish = make_finish(cut, plan, beside.bias, beside.columns)
    begin, barriers_at, cluster = pipeline.begin, plan.stages * plan.stage_bytes, plan.cluster
    produce, consume = make_produce(cut, plan, pipeline), make_consume(cut, plan, pipeline, finish)
    last_warp, moves_registers = 4 * CONSUMERS, plan.by_halves
    beside_of = _make_beside_of(cut)
    give, take = ptx_hopper.give_registers(COPYING_REGISTERS), ptx_hopper.take_registers(MULTIPLYING_REGISTERS)

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
        if cluster > 1:
            ptx_hopper.sync_cluster()
        else:
            cuda.syncthreads()
        return base, barriers

    def prefill_gemm_kernel(
        weight: Any, x: Any, bias: Any, columns: Any, scales: Any, out: Any, rows: Any, x_tiles: Any, units: Any,
        policy: Any,
    ) -> None:  # fmt: skip
        thread = uint32(cuda.threadIdx.x)
        unit = uint32(uint32(cuda.blockIdx.x) // uint32(cluster))
        grid = uint32(uint32(cuda.gridDim.x) // uint32(cluster))
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        base, barriers = begin_block(thread)
        if warp >= uint32(last_warp):
            if moves_registers:
                give()
            part = uint32(warp - uint32(last_warp))
            produce(
                base, barriers, weight, x, uint32(rows), uint32(x_tiles), uint32(units), unit, grid, part, lane, policy
            )  # fmt: skip
        else:
            if moves_registers:
                take()
            beside = beside_of(bias, columns, scales, x, rows)
            consume(
                base, barriers, beside, out, uint32(rows), uint32(x_tiles), uint32(units), unit, grid, warp, lane
            )  # fmt: skip
        if cluster > 1:  # until the other block has no more to copy here, and nothing to tell
            ptx_hopper.sync_cluster()

    kind = "" if cut.weights == BF16_TILES else f"{cut.weights.label}_"
    parts = "" if cut.parts is None else f"{cut.parts.name}_"
    name = (
        f"prefill_gemm_{kind}{cut.weight_rows}x{cut.columns}_{cut.segments}x{cut.length}_{parts}"
        f"{plan.rows}x{plan.depth}x{plan.stages}_{'pairs_' if plan.cluster > 1 else ''}"
        f"{'apart' if plan.apart else 'whole'}_{beside.name}"
    )
    signature = (types.int64,) * 10
    return Kernel(
        name, prefill_gemm_kernel, signature, plan.threads, 1, plan.shared_bytes, specific=True,
        whole=moves_registers, cluster=cluster,
    )  # fmt: skip


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Representative specialisations, for a GPU that has the instructions: Llama's GEMMs, and odd ones."""
    if not has_prefill_gemm(gpu):
        return []
    cases = (
        (128, 6144, 4096, Beside(False, True), BF16_TILES),
        (512, 4096, 4096, Beside(False, False), BF16_TILES),
        (512, 28672, 4096, Beside(False, False, True), BF16_TILES),
        (2048, 28672, 4096, Beside(False, False, True), BF16_TILES),
        (2048, 4096, 14336, Beside(False, False), BF16_TILES),
        (2048, 43008, 5376, Beside(False, False, True, GELU_TANH), BF16_TILES),
        (2048, 34816, 5120, Beside(False, False, True), BF16_TILES),
        (256, 24576, 4096, Beside(True, False, True, GELU_TANH), BF16_TILES),
        (64, 200, 72, Beside(True, True), BF16_TILES),
        (128, 6144, 4096, Beside(False, True), FP8.tiles(wide=False)),
        (2048, 28672, 4096, Beside(False, False, True), FP8.tiles(wide=False)),
        *((512, 28672, 4096, Beside(False, False, True), tiles) for tiles in representative_layouts()),
        (2048, 34816, 5120, Beside(False, False, True), FP8.tiles(wide=False)),
        (2048, 34816, 5120, Beside(False, False, True), int4_format(128, has_zeros=False).tiles(wide=False)),
        (2048, 6144, 2048, Beside(False, True), CODED_ROWS_TILES),
        (2048, 28672, 2048, Beside(False, False, True), CODED_ROWS_TILES),
        (2048, 4096, 7168, Beside(False, False), CODED_ROWS_TILES),
        (64, 6144, 2048, Beside(True, True), CODED_ROWS_TILES),
        (128, 28672, 2048, Beside(False, False, True), CODED_ROWS_TILES),
        (2048, 17408, 2560, Beside(False, False, True), CODED_ROWS_TILES),
        (512, 4096, 4096, Beside(True, False), int4_format(32, has_zeros=True).tiles(wide=True)),
    )
    made = []
    for rows, weight_rows, columns, beside, weights in cases:
        plan = plan_prefill_gemm(rows, weight_rows, columns, gpu, weights)
        cut = Cut(weight_rows, columns, *cut_of(weight_rows, columns, None), weights)
        made.append(_make(cut, plan, beside))
    for rows, columns, parts in ((512, 14336, KParts(8, 1)), (128, 320, KParts(8, 1)), (128, 4096, KParts(4, 4))):
        plan = plan_prefill_gemm(rows, 4096, columns, gpu, parts=parts)
        cut = Cut(4096, columns, *cut_of(4096, columns, parts), BF16_TILES, parts)
        made.append(_make(cut, plan, Beside(False, False)))
    return made
