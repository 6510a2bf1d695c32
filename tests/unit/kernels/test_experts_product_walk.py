"""The products of a mixture of experts, walked thread by thread on a CPU, however they are cut.

Small sizes; the walker checks every address, and copies arrive both as late and as early as they can.
"""

import dataclasses
from typing import Any

import pytest
import torch
from kernel_walk import Walker
from moe_cases import PASSES, Moe, logits_of, make_moe, make_topk_routing, of_codes, passing, want_routing
from moe_walk import small_gpu, walk

from lowlat.kernels.moe.topk_routing import TopKRouting

pytestmark = pytest.mark.second

MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # of codes
STEP_BYTES = {True: 544, False: 2048}  # of a tile of 16 rows by 64 columns, by whether it is quantised


def run(
    walker: Walker, moe: Moe, x: torch.Tensor, routing: TopKRouting, top_k: int, *, blocks: int = 3, **cut: int
) -> dict[str, Any]:
    """By two warps and two stages, but where a cut says otherwise."""
    found = moe.arguments(x, top_k)
    plan = moe.plan(len(x), top_k, small_gpu(blocks), **({"warps": 2, "stages": 2} | cut))
    walk(walker, found, routing, blocks, plan=plan)
    return found


def bytes_of(moe: Moe, units: int) -> int:
    """Of so many units' weights."""
    up, down = moe.up.packed, moe.down.packed
    tiles = sum(-(-each.rows // 16) * -(-each.columns // 64) for each in (up, down))
    return units * tiles * STEP_BYTES[up.scales is not None]


@pytest.mark.parametrize(
    ("late", "kind", "rows", "top_k", "quantised", "hidden", "inner"),
    [
        (True, "random", 1, 2, True, 288, 32),
        (False, "dead", 5, 2, True, 32, 160),
        (True, "shared", 11, 1, True, 160, 32),
        (True, "none", 2, 2, True, 64, 64),
        (False, "apart", 3, 2, False, 72, 40),
    ],
)
def test_products_are_the_reference_s(
    late: bool, kind: str, rows: int, top_k: int, quantised: bool, hidden: int, inner: int
) -> None:
    """Of 5 and of 3 steps' columns one of two warps has one more than the other, of one step one warp has none; 11 rows
    of one expert are two units, of 8 and of 3 pairs."""
    moe, walker = make_moe(5, hidden, inner, quantised=quantised), Walker(late)
    routing = make_topk_routing(kind, rows, top_k, 5)
    found = run(walker, moe, moe.rows(rows), routing, top_k)
    ids = found["expert_ids"]
    assert torch.equal(ids, want_routing(routing, top_k)[0])
    moe.check(found)
    units = sum(-(-int((ids == each).sum()) // 8) for each in ids[ids >= 0].unique())
    assert walker.bytes_copied == bytes_of(moe, units)


@pytest.mark.parametrize(
    ("late", "hidden", "inner", "cut"),
    [
        (True, 160, 32, {"stages": 1}),
        (False, 32, 160, {"stages": 5, "warps": 3}),
        (True, 32, 160, {"warps": 1, "part": 2}),
        (False, 160, 32, {"warps": 1, "part": 1, "stages": 3}),
    ],
)
@pytest.mark.wide
def test_units_begin_and_end_inside_of_runs(late: bool, hidden: int, inner: int, cut: dict[str, int]) -> None:
    """By every pipeline; three steps of columns of either product shared by more warps than there are steps, by fewer,
    and taken in parts of all of a warp's steps, of some, of one."""
    moe, walker = make_moe(5, hidden, inner), Walker(late)
    ids = torch.tensor([[0, 3], [4, 3], [1, 0]], dtype=torch.int32)
    found = run(walker, moe, moe.rows(3), TopKRouting(logits_of(ids, 5)), 2, blocks=5, **cut)
    assert torch.equal(found["expert_ids"], ids)
    moe.check(found)
    assert walker.bytes_copied == bytes_of(moe, 4)


@pytest.mark.parametrize(("up_warps", "down_warps"), [(1, 3)])
def test_warps_that_only_one_product_has(up_warps: int, down_warps: int) -> None:
    moe, routing = make_moe(4, 96, 96), make_topk_routing("random", 1, 2, 4)
    found, pair = moe.arguments(moe.rows(1), 2), moe.plan(1, 2, small_gpu(3), warps=3, part=1)
    first, second = (
        dataclasses.replace(plan, warps=warps)
        for plan, warps in ((pair.up_plan, up_warps), (pair.down_plan, down_warps))
    )
    walk(Walker(), found, routing, 3, plan=dataclasses.replace(pair, up_plan=first, down_plan=second))
    moe.check(found)


@pytest.mark.parametrize("kind", ["shared", "dead"])
@pytest.mark.wide
def test_pairs_for_more_than_a_warp_are_listed(kind: str) -> None:
    """In memory that looks as if pairs that are not there had chosen expert 0."""
    moe = make_moe(6, 32, 32)
    moe.check(run(Walker(rest=0), moe, moe.rows(11), make_topk_routing(kind, 11, 4, 6), 4))


@pytest.mark.wide
def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Next to rows that hold NaN, whoever shares its experts, and however the products are cut."""
    moe, ids = make_moe(4, 160, 32), torch.tensor([[2, 1]], dtype=torch.int32)
    row, own, walker = moe.rows(1), logits_of(ids, 4), Walker()
    alone = run(walker, moe, row, TopKRouting(own), 2)
    assert alone["partials"].isfinite().all()
    cuts: list[dict[str, int]] = [{}, {"part": 1, "blocks": 4}, {"stages": 1}]
    for rows, kind, cut in zip((9, 4, 3), ("shared", "random", "dead"), cuts, strict=True):
        x, routing = torch.full((rows, 160), torch.nan).bfloat16(), make_topk_routing(kind, rows, 2, 4)
        place = int(torch.randint(rows, (1,)))
        x[place], routing.logits[place] = row[0], own[0]
        if routing.row_live is not None:
            routing.row_live[0, place] = 1
        found = run(walker, moe, x, routing, 2, **cut)
        for name in ("expert_ids", "expert_weights", "activated", "partials"):
            assert torch.equal(found[name][place], alone[name][0]), (name, rows, kind)


@pytest.mark.parametrize(
    ("gated", "scale", "size"),
    [
        (False, 1, 1.0),
        (False, 2, 2.0**60),
        (False, 191, 2.0**50),
        (False, 191, 2.0**-61),
        (True, 191, 2.0**50),
    ],
)
def test_extremes_neither_overflow_nor_vanish(gated: bool, scale: int, size: float) -> None:
    """Of the first product, and of the second, whose inputs are the rows; sums stay normal numbers of float32."""
    codes = torch.randint(1, 8, (64, 64), dtype=torch.uint8)  # no cancellation: all positive
    experts = of_codes(codes, scale, gated=gated)
    moe = Moe(experts, of_codes(codes, 100, gated=False)) if gated else Moe(passing(64), experts)
    x = (torch.rand(1, 64) + 1).bfloat16() * size
    found = moe.arguments(x, 1) | PASSES
    walk(Walker(), found, TopKRouting(torch.zeros(1, 1)), 2, plan=moe.plan(1, 1, small_gpu(2), warps=2))
    matrix = torch.tensor(MAGNITUDES).double()[codes.long()] * 2.0 ** (scale - 127)
    want = matrix @ x[0].double()
    assert bool((want > 2.0**-126).all()) and bool((want < 2.0**127).all())
    got = found["activated" if gated else "partials"][0, 0].double()
    torch.testing.assert_close(got, want, rtol=2**-8 if gated else 1e-5, atol=0)
