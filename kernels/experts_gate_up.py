"""Gate and up products of the experts that rows chose, and the clamped SwiGLU, in one launch.

Experts are given; `experts_mlp` chooses them itself and has both products. `experts_product` tells how weights are
read.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.activation import clamped_swiglu
from lowlat.kernels.expert_packing import PackedExperts
from lowlat.kernels.experts_list import make_chosen, make_expert_of, make_pair_of
from lowlat.kernels.experts_plan import GATE_UP, ExpertPlan, ExpertShape, example_plans, launches_of
from lowlat.kernels.experts_product import Ending, make_product, make_total
from lowlat.kernels.kernel import H200, Card, Kernel, KernelCall
from lowlat.kernels.numba_cuda import cuda, device_function, int64, uint32
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["examples", "experts_gate_up", "make_swiglu"]


def experts_gate_up(
    *,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor,
    out: torch.Tensor,
    limit: float,
    alpha: float,
    card: Card = H200,
    plan: ExpertPlan | None = None,
) -> list[KernelCall]:
    """Gate and up products of the chosen experts and the clamped SwiGLU, in one launch for each 64 rows.

    x               [M, K]      bf16; with MXFP4 magnitudes below 2**64
    expert_ids      [M, R]      int32: no expert twice in a row; -1 dead
    weight          [E, 2I, K]  packed in the order of `gate_up_order`
    bias            [E, 2I]     bf16, in the weight's order
    out             [M, R, I]   bf16, out: (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up within
                                +-`limit`; in float32, rounded once; zero where dead
    card            what it runs on
    plan            how to cut it; None: `plan_experts`'
    It lets the next kernel start only when the kernel before it has ended: what was written before it is settled then.
    Time: the distinct experts' bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit.
    """
    rows, ranks = expert_ids.shape
    check_shape("x", x, rows, weight.columns)
    check_shape("bias", bias, weight.num_experts, weight.rows)
    check_shape("out", out, rows, ranks, weight.rows // 2)
    if weight.rows % 16 or weight.columns % 8:
        raise ShapeError(f"a gate_up matrix must be of multiples of 16 and 8, got {weight.rows} by {weight.columns}")
    shape = ExpertShape(GATE_UP, weight.rows, weight.columns, ranks, weight.scales is not None)
    scales = 0 if weight.scales is None else weight.scales
    calls = []
    for part, pairs, chosen in launches_of(rows, shape, card, plan):
        arguments = (weight.words, scales, x[part], expert_ids[part], 0, bias, out[part], pairs, limit, alpha)
        calls.append(KernelCall(_make(shape, chosen), (chosen.num_blocks, 1, 1), arguments))
    return calls


@cache
def _make(shape: ExpertShape, plan: ExpertPlan) -> Kernel:
    return make_product(shape, plan, make_swiglu(shape, plan, plan.threads))


def make_swiglu(shape: ExpertShape, plan: ExpertPlan, threads: int, *, awaited: bool = False) -> Ending:
    """What becomes of gate and up values; `threads` of a block clear the dead pairs.

    awaited  other blocks of the launch wait for the results, as `awaited` has it
    """
    store = ptx.store_relaxed_gpu_u16 if awaited else ptx.store_global_u16
    rows, expert_of, pair_of, total_of = shape.rows, make_expert_of(plan), make_pair_of(plan), make_total(plan)
    width = rows // 2

    @device_function
    def begin(lists: Any, beside: Any, unit: Any, tile: Any, _place: Any, value: Any) -> Any:
        bias, _ = beside
        at = bias + (int64(expert_of(lists, unit)) * rows + int64(tile) * 16 + int64(value)) * 2
        return ptx.load_global_u16(at), ptx.load_global_u16(at + 16)

    @device_function
    def finish(
        lists: Any, area: Any, out: Any, unit: Any, tile: Any, place: Any, value: Any, first: Any, second: Any,
        limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        gate = ptx.add_rn(total_of(area, place, value), ptx.float_of_bits(first << uint32(16)))
        up = ptx.add_rn(total_of(area, place, value + uint32(8)), ptx.float_of_bits(second << uint32(16)))
        pair = pair_of(lists, unit, place)
        at = int64(pair) * width + int64(tile) * 8 + int64(value)
        store(out + at * 2, ptx.bf16_bits(clamped_swiglu(gate, up, limit, alpha)))

    return Ending(begin, finish, _make_clear(shape, threads))


def _make_clear(shape: ExpertShape, threads: int) -> Any:
    """A function: zeros for the dead pairs, each from one block."""
    pieces, chosen = shape.rows // 16, make_chosen()

    @device_function
    def clear(lists: Any, out: Any, count: Any, thread: Any) -> None:
        zero = uint32(0)
        for pair in range(uint32(cuda.blockIdx.x), uint32(count), uint32(cuda.gridDim.x)):
            if not chosen(lists, pair):
                for piece in range(thread, uint32(pieces), uint32(threads)):
                    at = int64(pair) * pieces + int64(piece)
                    ptx.store_global_128(out + at * 16, zero, zero, zero, zero)

    return clear


def examples(card: Card = H200) -> list[Kernel]:
    """Representative specialisations, as a card has them."""
    return [_make(*each) for each in example_plans(GATE_UP, (5760, 2880), (192, 160), card)]
