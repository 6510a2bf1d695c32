"""This module has the grouped GEMMs of experts over many rows; packed weights are read once for each tile of pairs.

A block has 32 weight rows a warp and one tile of an expert's pairs. Blocks of a tile are neighbours in the grid, and so
are an expert's tiles, so that shared data is in the L2. `grouping` lists the pairs. The grid depends on shapes alone;
blocks without a tile exit at once.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import SILU, clamped_swiglu, gated_activation
from lowlat.kernels.formats import BF16, FP8_BLOCK, MXFP4
from lowlat.kernels.moe.formats import tiled_format
from lowlat.kernels.moe.packing import PackedExperts, check_expert_bias, shape_of
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill.mainloop import make_begin, make_multiply_tile, make_store_sums
from lowlat.kernels.moe.prefill.pair_tiles import TILE_WORDS, most_tiles
from lowlat.kernels.moe.prefill.plan import PAIR_BYTES, SUM_PITCH, GroupedPlan, plan_grouped
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Argument, Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "grouped_down", "grouped_gate_up"]


def grouped_gate_up(
    *,
    x: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    activation: str = SILU,
    plan: GroupedPlan,
) -> list[KernelCall]:
    """Multiply grouped pairs by gate and up matrices, and apply SwiGLU, in one launch.

    x      [M, K]      bf16
    order  [M * k]     int32: pairs by expert, as `group_pairs` has them
    tiles  [n, 4]      int32: tiles of `plan.pairs` pairs, as `group_pairs` has them
    weight [E, 2I, K]  packed in the order of `gate_up_permutation`
    bias   [E, 2I]     bf16, in the weight's order; None: none
    out    [M, k, I]   bf16, out: (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up within
                       +-`limit`, or without them up * gate * sigmoid(gate); in float32, rounded once. Dead pairs'
                       are not written
    activation         "silu", or "gelu_tanh" without a limit: up * gelu(gate)
    Time: the larger of the chosen experts' bytes over the memory's bandwidth and the arithmetic of the tiles of 16
    pairs. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    rows, top_k = out.shape[:2]
    check_shape("x", x, rows, weight.columns)
    check_shape("out", out, rows, top_k, weight.rows // 2)
    if weight.rows % 16:
        raise ShapeError(f"a gate_up matrix must have a multiple of 16 rows, got {weight.rows}")
    return _calls(GATE_UP, top_k, x, order, tiles, weight, bias, 0, out, limit, alpha, plan, activation=activation)


def grouped_down(
    *,
    activated: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    expert_weights: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    steps: tuple[int, int] | None = None,
    plan: GroupedPlan,
) -> list[KernelCall]:
    """Multiply grouped pairs by down matrices, each product times its share, in one launch.

    activated       [M, k, I]  bf16; dead pairs' are not read
    order, tiles               as `grouped_gate_up` takes them
    expert_weights  [M, k]     float32: the shares
    weight          [E, N, I]  packed
    bias            [E, N]     bf16; None: none
    out             [M, k, N]  float32, out: share * (down @ activated + bias), every product and sum rounded by itself;
                               dead pairs' are not written
    steps           the first of K's steps of 64 columns that are multiplied, and the one after the last; None: all
    Time, errors: as `grouped_gate_up`. Captured: yes.
    """
    rows, top_k = activated.shape[:2]
    check_shape("activated", activated, rows, top_k, weight.columns)
    check_shape("out", out, rows, top_k, weight.rows)
    check_shape("expert_weights", expert_weights, rows, top_k)
    if weight.rows % 4:
        raise ShapeError(f"a down matrix must have a multiple of 4 rows, got {weight.rows}")
    beside = (None, None, plan, steps)
    return _calls(DOWN, top_k, activated, order, tiles, weight, bias, expert_weights, out, *beside)


def _calls(
    kind: str,
    top_k: int,
    inputs: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor | None,
    shares: torch.Tensor | int,
    out: torch.Tensor,
    limit: float | None,
    alpha: float | None,
    plan: GroupedPlan,
    steps: tuple[int, int] | None = None,
    activation: str = SILU,
) -> list[KernelCall]:
    num_pairs = out.shape[0] * top_k
    check_shape("order", order, num_pairs)
    check_shape("tiles", tiles, most_tiles(num_pairs, weight.num_experts, plan.pairs), TILE_WORDS)
    check_expert_bias(bias, weight)
    if weight.columns % 8:
        raise ShapeError(f"experts' columns must be a multiple of 8, got {weight.columns}")
    clamped = kind == DOWN or limit is not None
    shape = shape_of(kind, weight, top_k, biased=bias is not None, clamped=clamped, activation=activation)
    beside: tuple[Argument, ...] = (shares, 0 if bias is None else bias, out, limit or 0.0, alpha or 0.0)
    words, scales, row_scales = weight.arguments
    if steps is not None:
        first, end = steps
        if weight.columns % 64 or not 0 <= first < end <= shape.steps:
            raise ShapeError(f"steps {first} to {end} are not some of {weight.columns} columns, whole steps of 64")
        shape = replace(shape, columns=64 * (end - first), pitch=weight.columns)
        words, inputs = words.view(-1)[first * weight.words.shape[-1] :], inputs.view(-1)[64 * first :]
        if isinstance(scales, torch.Tensor):
            scales = scales.view(-1)[first * scales.shape[-1] :]
    arguments = (words, scales, row_scales, inputs, order, tiles, *beside)
    return [KernelCall(_make(shape, plan), (tiles.shape[0] * plan.row_blocks(shape), 1, 1), arguments)]


@cache
def _make(shape: ExpertShape, plan: GroupedPlan) -> Kernel:
    """Grid: of each tile of pairs all blocks of weight rows, side by side."""
    list_at, row_blocks, num_tiles = plan.list_at(shape), plan.row_blocks(shape), shape.tiles
    area_bytes = plan.pairs * SUM_PITCH
    begin, multiply, store_sums = make_begin(shape, plan), make_multiply_tile(shape, plan), make_store_sums(plan)
    finish = _make_swiglu(shape) if shape.kind == GATE_UP else _make_weighing(shape)

    def experts_grouped(
        weight: Any, scales: Any, row_scales: Any, x: Any, order: Any, tiles: Any, shares: Any, bias: Any, out: Any,
        limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        tile = uint32(uint32(cuda.blockIdx.x) // uint32(row_blocks))
        row_block = uint32(uint32(cuda.blockIdx.x) - tile * uint32(row_blocks))
        pairs = uint32(base + uint32(list_at))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        expert, first, live, _ = ptx.load_global_128(tiles + int64(tile) * int64(16))
        if live == uint32(0):
            return
        if thread < live:
            pair = uint32(ptx.load_global_i32(order + int64(uint32(first + thread)) * int64(4)))
            ptx.store_shared_u32(uint32(pairs + thread * uint32(PAIR_BYTES)), pair)
        weights = begin(weight, scales, expert, row_block, warp, lane)
        has_rows = weights[3] < uint32(num_tiles)
        cuda.syncthreads()
        sums = multiply(base, pairs, x, weights, has_rows, live, thread)
        if has_rows:
            area = uint32(base + warp * uint32(area_bytes))
            store_sums(area, lane, sums)
            ptx.sync_warp()
            finish(area, pairs, (shares, bias, row_scales), out, expert, weights[3], live, lane, limit, alpha)

    name = (
        f"experts_grouped_{shape.kind}_{shape.rows}x{shape.columns}x{shape.top_k}_{shape.label}_"
        f"{plan.pairs}x{plan.warps}x{plan.stages}x{plan.skip}"
    )
    signature = (*(types.int64,) * 9, types.float32, types.float32)
    return Kernel(name, experts_grouped, signature, plan.threads, plan.min_blocks, plan.shared_bytes(shape))


@device_function
def _low(word: Any) -> Any:
    return ptx.float_of_bits(uint32(word << uint32(16)))


@device_function
def _high(word: Any) -> Any:
    return ptx.float_of_bits(uint32(word & uint32(0xFFFF0000)))


def _make_finished(shape: ExpertShape) -> Any:
    """A device function that multiplies two rows' sums by their scales and adds their biases, if they have them."""
    biased, scaled = shape.biased, shape.format.row_scales

    @device_function
    def finished(sums: Any, bias: Any, first_scale: Any, second_scale: Any) -> Any:
        first, second = sums
        if scaled:
            first = ptx.mul_rn(first, ptx.float_of_bits(first_scale))
            second = ptx.mul_rn(second, ptx.float_of_bits(second_scale))
        if biased:
            first, second = ptx.add_rn(first, _low(bias)), ptx.add_rn(second, _high(bias))
        return first, second

    return finished


def _make_swiglu(shape: ExpertShape) -> Any:
    """A device function of a warp: the epilogue of gate and up sums; a lane has a tile's eight channels, two a pair."""
    num_tiles, rows, width, finished = shape.tiles, shape.rows, shape.rows // 2, _make_finished(shape)
    biased, scaled, clamped, padded = shape.biased, shape.format.row_scales, shape.clamped, shape.padded_rows

    plain = gated_activation(shape.activation)

    @device_function
    def gated(gate: Any, up: Any, limit: Any, alpha: Any) -> Any:
        return clamped_swiglu(gate, up, limit, alpha) if clamped else plain(gate, up)

    @device_function
    def activated(gate: Any, up: Any, biases: Any, scales: Any, limit: Any, alpha: Any) -> Any:
        """Two channels, as a pair of bf16."""
        first, second = finished(gate, biases[0], scales[0], scales[1])
        above, other = finished(up, biases[1], scales[2], scales[3])
        return ptx.bf16_pair(gated(first, above, limit, alpha), gated(second, other, limit, alpha))

    @device_function
    def load_two_scales(place: Any) -> Any:
        """Those of two gate rows, and of their up rows."""
        none = uint32(0)
        a, b, c, d = none, none, none, none
        if scaled:
            a, b = ptx.load_global_64(place)
            c, d = ptx.load_global_64(place + int64(32))
        return a, b, c, d

    @device_function
    def load_two(place: Any) -> Any:
        return ptx.load_shared_f32(place), ptx.load_shared_f32(uint32(place + uint32(4)))

    @device_function
    def finish(
        area: Any, pairs: Any, beside: Any, out: Any, expert: Any, tile: Any, live: Any, lane: Any, limit: Any,
        alpha: Any,
    ) -> None:  # fmt: skip
        half = uint32(lane & uint32(1))
        tile, number = uint32(tile + half), uint32(lane >> uint32(1))
        if tile < uint32(num_tiles):
            at = beside[1] + (int64(expert) * int64(rows) + int64(tile) * int64(16)) * int64(2)
            none = uint32(0)
            b0, b1, b2, b3, u0, u1, u2, u3 = none, none, none, none, none, none, none, none
            if biased:
                b0, b1, b2, b3 = ptx.load_global_128(at)
                u0, u1, u2, u3 = ptx.load_global_128(at + int64(16))
            at = beside[2] + (int64(expert) * int64(padded) + int64(tile) * int64(16)) * int64(4)
            s0, s1 = load_two_scales(at), load_two_scales(at + int64(8))
            s2, s3 = load_two_scales(at + int64(16)), load_two_scales(at + int64(24))
            while number < live:
                pair = ptx.load_shared_u32(uint32(pairs + number * uint32(PAIR_BYTES)))
                gate = uint32(area + number * uint32(SUM_PITCH) + half * uint32(64))
                up = uint32(gate + uint32(32))
                first = activated(load_two(gate), load_two(up), (b0, u0), s0, limit, alpha)
                gate, up = uint32(gate + uint32(8)), uint32(up + uint32(8))
                second = activated(load_two(gate), load_two(up), (b1, u1), s1, limit, alpha)
                gate, up = uint32(gate + uint32(8)), uint32(up + uint32(8))
                third = activated(load_two(gate), load_two(up), (b2, u2), s2, limit, alpha)
                gate, up = uint32(gate + uint32(8)), uint32(up + uint32(8))
                last = activated(load_two(gate), load_two(up), (b3, u3), s3, limit, alpha)
                target = out + (int64(pair) * int64(width) + int64(tile) * int64(8)) * int64(2)
                ptx.store_global_128(target, first, second, third, last)
                number = uint32(number + uint32(16))

    return finish


def _make_weighing(shape: ExpertShape) -> Any:
    """A device function of a warp: the epilogue of its down sums; a lane has four rows, eight lanes a pair."""
    rows, padded, finished = shape.rows, shape.padded_rows, _make_finished(shape)
    biased, scaled = shape.biased, shape.format.row_scales

    @device_function
    def weighed(area: Any, bias: Any, first_scale: Any, second_scale: Any, share: Any) -> Any:
        """Two rows."""
        sums = ptx.load_shared_f32(area), ptx.load_shared_f32(uint32(area + uint32(4)))
        first, second = finished(sums, bias, first_scale, second_scale)
        return ptx.bits_of_float(ptx.mul_rn(share, first)), ptx.bits_of_float(ptx.mul_rn(share, second))

    @device_function
    def finish(
        area: Any, pairs: Any, beside: Any, out: Any, expert: Any, tile: Any, live: Any, lane: Any, _limit: Any,
        _alpha: Any,
    ) -> None:  # fmt: skip
        shares, bias, scales = beside
        within, number = uint32(uint32(lane & uint32(7)) * uint32(4)), uint32(lane >> uint32(3))
        row = uint32(tile * uint32(16) + within)
        if row < uint32(rows):
            none = uint32(0)
            low, high, s0, s1, s2, s3 = none, none, none, none, none, none
            if biased:
                low, high = ptx.load_global_64(bias + (int64(expert) * int64(rows) + int64(row)) * int64(2))
            if scaled:
                at = scales + (int64(expert) * int64(padded) + int64(row)) * int64(4)
                s0, s1, s2, s3 = ptx.load_global_128(at)
            while number < live:
                pair = ptx.load_shared_u32(uint32(pairs + number * uint32(PAIR_BYTES)))
                share = ptx.load_global_f32(shares + int64(pair) * int64(4))
                place = uint32(area + number * uint32(SUM_PITCH) + within * uint32(4))
                a, b = weighed(place, low, s0, s1, share)
                c, d = weighed(uint32(place + uint32(8)), high, s2, s3, share)
                ptx.store_global_128(out + (int64(pair) * int64(rows) + int64(row)) * int64(4), a, b, c, d)
                number = uint32(number + uint32(4))

    return finish


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Representative specialisations, as a GPU has them: gpt-oss in MXFP4, Qwen3-30B-A3B in FP8 by blocks, an odd
    shape in bf16."""
    up, blocks = ExpertShape(GATE_UP, 5760, 2880, 4, MXFP4), FP8_BLOCK.tiles(wide=True)
    down = ExpertShape(DOWN, 2048, 768, 8, tiled_format("fp8_block", blocks), biased=False)
    cases = ((up, 96), (down, 32), (ExpertShape(DOWN, 100, 72, 2, BF16), 16),
             (ExpertShape(DOWN, 2880, 384, 4, MXFP4, pitch=2880), 32))  # fmt: skip
    return [_make(shape, plan_grouped(pairs, shape, gpu)) for shape, pairs in cases]
