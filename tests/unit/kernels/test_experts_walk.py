"""The experts' kernels themselves, walked thread by thread on a CPU: what they compute, copy, wait for and leave alone.

Small sizes; the walker checks every address, and copies arrive both as late and as early as they can.
"""

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from expert_cases import (
    ALPHA,
    LIMIT,
    Experts,
    choices,
    make_experts,
    shares_of,
    want_down,
    want_gate_up,
)
from kernel_inventory import B200, CARDS
from kernel_walk import Walker, walkable

from lowlat.errors import ShapeError
from lowlat.kernels.expert_packing import PackedExperts, pack_experts
from lowlat.kernels.experts_down import experts_down
from lowlat.kernels.experts_gate_up import experts_gate_up
from lowlat.kernels.experts_plan import DOWN, GATE_UP, ExpertShape, plan_experts, rows_a_launch, warps_of
from lowlat.kernels.kernel import H200, Card

PARTS = ("plan", "list", "multiply", "copy", "product", "gate_up", "down")
NAMES = ("handover", *(f"experts_{part}" for part in PARTS), "norm_row", "norm_math", "awaited", "activation")
SMALL = Card(3, 100 * 1024, (9, 0))


def walked(walker: Walker) -> Any:
    return walkable(walker, *NAMES)


def run_gate_up(
    walker: Walker, modules: list[ModuleType], experts: Experts, x: torch.Tensor, ids: torch.Tensor, **changes: int
) -> torch.Tensor:
    plan, gate_up = modules[1], modules[6]
    packed = experts.packed
    shape = plan.ExpertShape(plan.GATE_UP, packed.rows, packed.columns, ids.shape[1], packed.scales is not None)
    most = min(x.shape[0], plan.rows_a_launch(ids.shape[1]))
    chosen = plan.plan_experts(most, shape, SMALL, **({"warps": 2, "stages": 2} | changes))
    out = torch.full((*ids.shape, packed.rows // 2), torch.nan, dtype=torch.bfloat16)
    calls = gate_up.experts_gate_up(
        x=x, expert_ids=ids, weight=packed, bias=experts.bias[:, experts.order].contiguous(), out=out,
        limit=LIMIT, alpha=ALPHA, plan=chosen,
    )  # fmt: skip
    for call in calls:
        walker.run(call)
    return out


def run_down(
    walker: Walker, modules: list[ModuleType], experts: Experts, activated: torch.Tensor, ids: torch.Tensor, **more: int
) -> torch.Tensor:
    """By ids and `shares_of` them."""
    plan, down = modules[1], modules[7]
    packed = experts.packed
    shape = plan.ExpertShape(plan.DOWN, packed.rows, packed.columns, ids.shape[1], packed.scales is not None)
    changes = {"warps": 2, "stages": 2} | more
    part = changes.pop("part", 0)
    most = min(ids.shape[0], plan.rows_a_launch(ids.shape[1]))
    chosen = plan.plan_experts(most, shape, SMALL, **changes)
    chosen = dataclasses.replace(chosen, part=part or chosen.part)
    out = torch.full((*ids.shape, packed.rows), torch.nan)
    calls = down.experts_down(
        activated=activated, weight=packed, bias=experts.bias, out=out, plan=chosen, expert_ids=ids,
        expert_weights=shares_of(ids),
    )  # fmt: skip
    for call in calls:
        walker.run(call)
    return out


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("kind", "rows", "ranks", "quantised"),
    [
        ("random", 1, 2, True),
        ("dead", 5, 2, True),
        ("shared", 11, 1, True),
        ("none", 2, 2, True),
        ("apart", 3, 2, False),
    ],
)
def test_gate_up_is_the_reference_s(late: bool, kind: str, rows: int, ranks: int, quantised: bool) -> None:
    """Of 5 steps' columns two warps have three and two; 11 rows of one expert are two units, of 8 and of 3 pairs."""
    experts = make_experts(5, 48, 288, quantised=quantised, gated=True)
    x, ids = torch.randn(rows, 288).bfloat16(), choices(kind, rows, ranks, 5)
    walker = Walker(late)
    with walked(walker) as modules:
        got = run_gate_up(walker, modules, experts, x, ids)
    want = want_gate_up(experts, x, ids)
    assert not got[ids < 0].any()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
    units = {int(each): -(-int((ids == each).sum()) // 8) for each in ids[ids >= 0].unique()}
    step = 544 if quantised else 2048
    assert walker.bytes_copied == sum(units.values()) * 3 * 5 * step


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("kind", "rows", "quantised", "width", "depth"),
    [("random", 3, True, 40, 160), ("dead", 4, True, 16, 64), ("shared", 9, True, 24, 96), ("apart", 2, False, 33, 72)],
)
def test_down_is_the_reference_s(late: bool, kind: str, rows: int, quantised: bool, width: int, depth: int) -> None:
    experts = make_experts(4, width, depth, quantised=quantised, gated=False)
    ids = choices(kind, rows, 2, 4)
    activated = torch.randn(rows, 2, depth).bfloat16()
    activated[ids < 0] = torch.nan
    walker = Walker(late)
    with walked(walker) as modules:
        got = run_down(walker, modules, experts, activated, ids)
    want = want_down(experts, torch.nan_to_num(activated), ids)
    assert not got[ids < 0].any()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("late", "changes"),
    [
        (True, {"stages": 1}),
        (False, {"stages": 5, "warps": 3}),
        (True, {"warps": 4}),
        (False, {"warps": 1}),
        (True, {"warps": 1, "part": 2}),
        (False, {"warps": 1, "part": 1, "stages": 3}),
        (True, {"part": 1}),
    ],
)
def test_units_begin_and_end_inside_of_runs(late: bool, changes: dict[str, Any]) -> None:
    """Units of three tiles of an expert in runs of four, by every pipeline; three steps of columns shared by more warps
    than there are steps, by fewer, and taken in parts of all of a warp's steps, of some, of one."""
    experts = make_experts(5, 48, 160, quantised=True, gated=False)
    ids = torch.tensor([[0, 3], [4, 3], [1, 0]], dtype=torch.int32)
    activated = torch.randn(3, 2, 160).bfloat16()
    walker = Walker(late)
    with walked(walker) as modules:
        got = run_down(walker, modules, experts, activated, ids, **changes)
    torch.testing.assert_close(got, want_down(experts, activated, ids), rtol=1e-5, atol=1e-5)
    assert walker.bytes_copied == 4 * 3 * 3 * 544


@pytest.mark.parametrize("kind", ["random", "shared", "dead"])
def test_pairs_for_more_than_a_warp_are_listed(kind: str) -> None:
    experts = make_experts(6, 16, 64, quantised=True, gated=False)
    ids = choices(kind, 11, 4, 6)
    activated = torch.randn(11, 4, 64).bfloat16()
    walker = Walker()
    with walked(walker) as modules:
        got = run_down(walker, modules, experts, activated, ids)
    torch.testing.assert_close(got, want_down(experts, activated, ids), rtol=1e-5, atol=1e-5)


def test_a_pair_has_the_same_bits_in_any_company() -> None:
    experts = make_experts(4, 32, 224, quantised=True, gated=False)
    row = torch.randn(1, 2, 224).bfloat16()
    ids = torch.tensor([[2, 1]], dtype=torch.int32)
    walker = Walker()
    with walked(walker) as modules:
        alone = run_down(walker, modules, experts, row, ids)
        cases: list[tuple[int, str, dict[str, Any]]]
        cases = [(9, "shared", {}), (4, "random", {"part": 1}), (3, "dead", {"stages": 1})]
        for rows, kind, changes in cases:
            others = choices(kind, rows, 2, 4)
            activated = torch.full((rows, 2, 224), torch.nan).bfloat16()
            place = int(torch.randint(rows, (1,)))
            others[place], activated[place] = ids[0], row[0]
            got = run_down(walker, modules, experts, activated, others, **changes)
            assert torch.equal(got[place], alone[0])


@pytest.mark.parametrize(("scale", "size"), [(1, 1.0), (2, 2.0**60), (191, 2.0**50), (127, 2.0**60), (191, 2.0**-61)])
def test_extremes_neither_overflow_nor_vanish(scale: int, size: float) -> None:
    """Sums stay normal numbers of float32 in the reference; nothing on the way there is lost."""
    experts = make_experts(1, 16, 64, quantised=True, gated=False, scales=(scale, scale))
    activated = (torch.rand(1, 1, 64) + 1).bfloat16() * size
    experts.matrices["blocks"] &= 0x77  # no cancellation: all positive
    experts.bias.zero_()
    ids = torch.zeros(1, 1, dtype=torch.int32)
    experts = Experts(experts.matrices, _packed(experts), experts.bias, None)
    walker = Walker()
    with walked(walker) as modules:
        got = run_down(walker, modules, experts, activated, ids)
    want = want_down(experts, activated, ids)
    assert want.isfinite().all() and bool((want.abs() > 2.0**-126).all())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("card", [*CARDS.values(), B200], ids=str)
@pytest.mark.parametrize("quantised", [True, False])
def test_plans_fit_their_card(rows: int, card: Card, quantised: bool) -> None:
    """And list all pairs, and finish a tile a value a lane, or by one warp."""
    for kind, width in ((GATE_UP, 5760), (DOWN, 2880)):
        shape = ExpertShape(kind, width, 2880, 4, quantised)
        plan = plan_experts(rows, shape, card)
        assert plan.shared_bytes(shape) <= card.shared_bytes
        assert plan.capacity >= rows * 4 and plan.threads >= plan.capacity
        assert plan.warps == warps_of(45) == 15 and plan.patient == (card.capability >= (9, 0))
        assert plan.finishing == 1 or plan.finishing * 32 == plan.columns * shape.values
        assert plan.num_blocks == card.num_multiprocessors
        if quantised:
            assert (plan.columns, plan.part, plan.stages) == (min(rows, 8), 3, 2)


def test_steps_are_shared_evenly() -> None:
    for steps in range(1, 400):
        warps = warps_of(steps)
        assert 7 <= warps <= 15
        assert -(-steps // warps) == -(-steps // 15)  # no more steps than with most warps
        assert steps <= 7 or warps == 7 or -(-steps // (warps - 1)) > -(-steps // warps)  # and no warp for nothing


def test_what_no_block_holds_is_refused() -> None:
    wide = ExpertShape(DOWN, 4096, 14336, 2, False)
    plan = plan_experts(8, wide, H200)
    assert plan.part < plan.steps_a_warp(wide) == 15
    with pytest.raises(ShapeError, match="experts for 8 rows does not fit the 16384 bytes"):
        plan_experts(8, wide, Card(132, 16384, (9, 0)))
    with pytest.raises(ShapeError, match="300 experts a row; at most 256"):
        rows_a_launch(300)
    with pytest.raises(ShapeError, match="160 threads list no more"):
        plan_experts(64, ExpertShape(DOWN, 4096, 14336, 4, False), H200, warps=1)


def test_arrays_that_do_not_fit_are_refused() -> None:
    experts = make_experts(2, 32, 64, quantised=True, gated=True)
    x, ids = torch.zeros(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int32)
    fine = {"x": x, "expert_ids": ids, "weight": experts.packed, "bias": experts.bias, "limit": 7.0, "alpha": 1.7}
    fine["out"] = torch.zeros(3, 2, 16).bfloat16()
    assert len(experts_gate_up(**fine)) == 1  # type: ignore[arg-type]
    for name, wrong in (("x", x[:, :32]), ("bias", experts.bias[:1]), ("out", fine["out"][:2])):  # type: ignore[index]
        with pytest.raises(ShapeError, match=f"{name} must have shape"):
            experts_gate_up(**(fine | {name: wrong}))  # type: ignore[arg-type]
    whole = {"activated": torch.zeros(3, 2, 64).bfloat16(), "expert_ids": ids, "weight": experts.packed}
    whole |= {"expert_weights": torch.zeros(3, 2), "bias": experts.bias, "out": torch.zeros(3, 2, 32)}
    assert len(experts_down(**whole)) == 1  # type: ignore[arg-type]
    for name in ("expert_ids", "expert_weights", "bias", "out"):
        with pytest.raises(ShapeError, match=f"{name} must have shape"):
            experts_down(**(whole | {name: whole[name][:1]}))  # type: ignore[index]
    with pytest.raises(ShapeError, match="activated must have shape"):
        experts_down(**(whole | {"activated": torch.zeros(3, 2, 32).bfloat16()}))  # type: ignore[arg-type]


def _packed(experts: Experts) -> PackedExperts:
    return pack_experts(**experts.matrices)
