"""Down products of the experts that rows chose, one row of partial sums for each of a row's ranks.

Bias, shares and the sum over ranks are the next kernel's: `experts_product` tells how weights are read.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.expert_packing import PackedExperts
from lowlat.kernels.experts_list import make_pair_of
from lowlat.kernels.experts_plan import DOWN, ExpertPlan, ExpertShape, launches_of, plan_experts
from lowlat.kernels.experts_product import Ending, make_product, make_total
from lowlat.kernels.kernel import H200, Card, Kernel, KernelCall
from lowlat.kernels.numba_cuda import device_function, int64, uint32
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["examples", "experts_down"]


def experts_down(
    *,
    activated: torch.Tensor,
    expert_ids: torch.Tensor,
    weight: PackedExperts,
    out: torch.Tensor,
    card: Card = H200,
    plan: ExpertPlan | None = None,
) -> list[KernelCall]:
    """Down products of the chosen experts, without bias and share, in one launch for each 64 rows.

    activated   [M, R, I]  bf16; with MXFP4 magnitudes below 2**64
    expert_ids  [M, R]     int32: no expert twice in a row; -1 dead
    weight      [E, N, I]  packed
    out         [M, R, N]  float32, out: down @ activated; dead pairs are not written, and must not be read
    card        what it runs on
    plan        how to cut it; None: `plan_experts`'
    The ids and weights are read before the kernel before this one has ended. So the ids must have been written before
    `experts_gate_up`, which must come between: it lets later kernels start only when what came before it has ended.
    Time: the distinct experts' bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit.
    """
    rows, ranks = expert_ids.shape
    check_shape("activated", activated, rows, ranks, weight.columns)
    check_shape("out", out, rows, ranks, weight.rows)
    if weight.columns % 8:
        raise ShapeError(f"a down matrix's columns must be a multiple of 8, got {weight.columns}")
    shape = ExpertShape(DOWN, weight.rows, weight.columns, ranks, weight.scales is not None)
    scales = 0 if weight.scales is None else weight.scales
    calls = []
    for part, pairs, chosen in launches_of(rows, shape, card, plan):
        arguments = (weight.words, scales, activated[part], expert_ids[part], 0, out[part], pairs, 0.0, 0.0)
        calls.append(KernelCall(_make(shape, chosen), (chosen.num_blocks, 1, 1), arguments))
    return calls


@cache
def _make(shape: ExpertShape, plan: ExpertPlan) -> Kernel:
    rows, pair_of, total_of = shape.rows, make_pair_of(plan), make_total(plan)

    @device_function
    def begin(_lists: Any, _bias: Any, _unit: Any, _tile: Any, _value: Any) -> Any:
        return uint32(0), uint32(0)

    @device_function
    def finish(
        lists: Any, area: Any, out: Any, unit: Any, tile: Any, place: Any, value: Any, _first: Any, _second: Any,
        _limit: Any, _alpha: Any,
    ) -> None:  # fmt: skip
        row = int64(tile) * 16 + int64(value)
        if row < rows:
            pair = pair_of(lists, unit, place)
            ptx.store_global_f32(out + (int64(pair) * rows + row) * 4, total_of(area, place, value))

    @device_function
    def clear(_lists: Any, _out: Any, _count: Any, _thread: Any) -> None:
        return

    return make_product(shape, plan, Ending(begin, finish, clear))


def examples(card: Card = H200) -> list[Kernel]:
    """Representative specialisations, as a card has them: gpt-oss in MXFP4 and bf16, 1 to 64 rows, an odd shape."""
    made = []
    for rows, shape in (
        (1, ExpertShape(DOWN, 2880, 2880, 4, True)),
        (4, ExpertShape(DOWN, 2880, 2880, 4, True)),
        (64, ExpertShape(DOWN, 2880, 2880, 4, True)),
        (4, ExpertShape(DOWN, 2880, 2880, 4, False)),
        (3, ExpertShape(DOWN, 100, 96, 2, True)),
    ):
        made.append(_make(shape, plan_experts(rows, shape, card)))
    return made
