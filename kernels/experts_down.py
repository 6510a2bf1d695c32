"""Down products of the experts that rows chose, weighed: one row of what is to be added for each of a row's ranks.

The sum over ranks is a later kernel's. Experts are given; `experts_mlp` chooses them itself and has both products.
`experts_product` tells how weights are read.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.expert_packing import PackedExperts
from lowlat.kernels.experts_list import make_chosen, make_expert_of, make_pair_of, make_share_of
from lowlat.kernels.experts_plan import DOWN, ExpertPlan, ExpertShape, example_plans, launches_of
from lowlat.kernels.experts_product import Ending, make_product, make_total
from lowlat.kernels.kernel import H200, Card, Kernel, KernelCall
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int64, uint32
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["examples", "experts_down", "make_weighing"]


def experts_down(
    *,
    activated: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor,
    out: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    card: Card = H200,
    plan: ExpertPlan | None = None,
) -> list[KernelCall]:
    """Down products of the chosen experts, each times its share, in one launch for each 64 rows.

    activated       [M, R, I]  bf16; with MXFP4 magnitudes below 2**64
    weight          [E, N, I]  packed
    bias            [E, N]     bf16
    out             [M, R, N]  float32, out: share * (down @ activated + bias), every product and sum rounded by itself;
                               zero where dead
    expert_ids      [M, R]     int32: no expert twice in a row; -1 dead
    expert_weights  [M, R]     float32: the shares
    card            what it runs on
    plan            how to cut it; None: `plan_experts`'
    Ids are read before the kernel before this one has ended. So they must have been written before `experts_gate_up`,
    which must come between: it lets later kernels start only when what came before it has ended.
    Time: the distinct experts' bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit.
    """
    rows, ranks = activated.shape[:2]
    check_shape("activated", activated, rows, ranks, weight.columns)
    check_shape("bias", bias, weight.num_experts, weight.rows)
    check_shape("out", out, rows, ranks, weight.rows)
    if weight.columns % 8:
        raise ShapeError(f"a down matrix's columns must be a multiple of 8, got {weight.columns}")
    check_shape("expert_ids", expert_ids, rows, ranks)
    check_shape("expert_weights", expert_weights, rows, ranks)
    shape = ExpertShape(DOWN, weight.rows, weight.columns, ranks, weight.scales is not None)
    scales = 0 if weight.scales is None else weight.scales
    calls = []
    for part, pairs, chosen in launches_of(rows, shape, card, plan):
        given = (expert_ids[part], expert_weights[part])
        arguments = (weight.words, scales, activated[part], *given, bias, out[part], pairs, 0.0, 0.0)
        calls.append(KernelCall(_make(shape, chosen), (chosen.num_blocks, 1, 1), arguments))
    return calls


@cache
def _make(shape: ExpertShape, plan: ExpertPlan) -> Kernel:
    return make_product(shape, plan, make_weighing(shape, plan, plan.threads, chosen_here=False))


def make_weighing(shape: ExpertShape, plan: ExpertPlan, threads: int, *, chosen_here: bool) -> Ending:
    """What becomes of down's values; `threads` of a block clear the dead pairs."""
    store = ptx.store_relaxed_gpu_f32 if chosen_here else ptx.store_global_f32
    rows, expert_of, pair_of, total_of = shape.rows, make_expert_of(plan), make_pair_of(plan), make_total(plan)
    share_of = make_share_of(plan, chosen_here=chosen_here)

    @device_function
    def begin(lists: Any, beside: Any, unit: Any, tile: Any, place: Any, value: Any) -> Any:
        bias, shares = beside
        row, own = int64(tile) * 16 + int64(value), uint32(0)
        if row < rows:
            own = ptx.load_global_u16(bias + (int64(expert_of(lists, unit)) * rows + row) * 2)
        return own, ptx.bits_of_float(share_of(lists, shares, pair_of(lists, unit, place)))

    @device_function
    def finish(
        lists: Any, area: Any, out: Any, unit: Any, tile: Any, place: Any, value: Any, first: Any, second: Any,
        _limit: Any, _alpha: Any,
    ) -> None:  # fmt: skip
        row = int64(tile) * 16 + int64(value)
        if row < rows:
            pair = pair_of(lists, unit, place)
            total = ptx.add_rn(total_of(area, place, value), ptx.float_of_bits(first << uint32(16)))
            store(out + (int64(pair) * rows + row) * 4, ptx.mul_rn(ptx.float_of_bits(second), total))

    return Ending(begin, finish, _make_clear(shape, threads, store))


def _make_clear(shape: ExpertShape, threads: int, store: Any) -> Any:
    """A function: zeros for the dead pairs, each from one block."""
    rows, chosen = shape.rows, make_chosen()

    @device_function
    def clear(lists: Any, out: Any, count: Any, thread: Any) -> None:
        for pair in range(uint32(cuda.blockIdx.x), uint32(count), uint32(cuda.gridDim.x)):
            if not chosen(lists, pair):
                for row in range(thread, uint32(rows), uint32(threads)):
                    store(out + (int64(pair) * rows + int64(row)) * 4, float32(0))

    return clear


def examples(card: Card = H200) -> list[Kernel]:
    """Representative specialisations, as a card has them."""
    return [_make(*each) for each in example_plans(DOWN, (2880, 2880), (100, 96), card)]
