"""Grouped GEMMs of experts, walked thread by thread on a CPU: grouping, both GEMMs, the sum over each row's experts.

Small sizes; the walker checks every address, and copies arrive both as late and as early as they can.
"""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from expert_cases import (
    Experts,
    all_codes_and_scales,
    choices,
    make_experts,
    shares_of,
    want_down,
    want_gate_up,
)
from kernel_inventory import B200, GPUS
from kernel_walk import Walker, walkable
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.formats import BF16, MXFP4
from lowlat.kernels.moe.packing import pack_experts, unpack_expert
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill.pair_tiles import most_tiles, tile_pairs_of
from lowlat.kernels.moe.prefill.plan import GroupedPlan, plan_grouped
from lowlat.kernels.toolchain.kernel import H200, Gpu

pytestmark = pytest.mark.second

PARTS = tuple(f"moe.prefill.{part}" for part in ("plan", "grouping", "mainloop", "grouped_gemm"))
KERNELS = (*PARTS, "moe.topk_sum")
FILL = -77


def walked(walker: Walker) -> Any:
    return walkable(walker, *KERNELS)


def named(modules: list[ModuleType]) -> SimpleNamespace:
    names = (name.rpartition(".")[2] for name in KERNELS)
    return SimpleNamespace(**dict(zip(names, modules, strict=True)))


def wanted_groups(ids: torch.Tensor, num_experts: int, tile_pairs: int) -> tuple[list[int], list[list[int]]]:
    """Pairs by expert, and the tiles."""
    order: list[int] = []
    tiles: list[list[int]] = []
    flat = ids.reshape(-1).tolist()
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        number = max(1, -(-len(pairs) // tile_pairs))
        size = min(tile_pairs, -(-len(pairs) // number // 8) * 8)  # as equal as eights are
        for start in range(0, len(pairs), max(size, 1)):
            tiles.append([expert, len(order) + start, min(size, len(pairs) - start), 0])
        order += pairs
    return order, tiles


def grouped(
    walker: Walker, kernels: SimpleNamespace, ids: torch.Tensor, num_experts: int, tile_pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.full((ids.numel(),), FILL, dtype=torch.int32)
    tiles = torch.full((most_tiles(ids.numel(), num_experts, tile_pairs), 4), FILL, dtype=torch.int32)
    calls = kernels.grouping.group_pairs(
        expert_ids=ids, num_experts=num_experts, tile_pairs=tile_pairs, order=order, tiles=tiles
    )
    walker.run(*calls)
    return order, tiles


@pytest.mark.parametrize(
    ("kind", "rows", "top_k", "num_experts", "tile_pairs"),
    [
        ("random", 1, 1, 3, 16),
        ("random", 37, 4, 40, 16),
        ("shared", 50, 2, 5, 16),
        ("dead", 41, 3, 64, 2),
        ("apart", 33, 2, 7, 4),
        ("none", 9, 4, 6, 16),
        ("last", 40, 1, 33, 32),
    ],
)
def test_pairs_are_grouped_by_expert(kind: str, rows: int, top_k: int, num_experts: int, tile_pairs: int) -> None:
    """More pairs than a round of a warp, more experts than lanes, tiles cut and not; nothing more is written."""
    ids = choices(kind, rows, top_k, num_experts)
    if kind == "last":
        ids[:] = num_experts - 1
    walker = Walker()
    with walked(walker) as modules:
        order, tiles = grouped(walker, named(modules), ids, num_experts, tile_pairs)
    want_order, want_tiles = wanted_groups(ids, num_experts, tile_pairs)
    assert order[: len(want_order)].tolist() == want_order and (order[len(want_order) :] == FILL).all()
    assert tiles[: len(want_tiles)].tolist() == want_tiles and not tiles[len(want_tiles) :].any()


def test_a_warp_goes_through_its_pairs_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many warps as a block may have are too many to walk: two of them here, of three rounds and of two."""
    ids, walker = choices("random", 37, 4, 9), Walker()
    with walked(walker) as modules:
        kernels = named(modules)
        monkeypatch.setattr(kernels.grouping, "MAX_WARPS", 2)
        order, tiles = grouped(walker, kernels, ids, 9, 16)
    want_order, want_tiles = wanted_groups(ids, 9, 16)
    assert order.tolist() == want_order and tiles[: len(want_tiles)].tolist() == want_tiles


def run_gate_up(
    walker: Walker, experts: Experts, x: torch.Tensor, ids: torch.Tensor, plan: GroupedPlan
) -> torch.Tensor:
    packed = experts.packed
    out = torch.full((*ids.shape, packed.rows // 2), FILL, dtype=torch.bfloat16)
    with walked(walker) as modules:
        kernels = named(modules)
        order, tiles = grouped(walker, kernels, ids, packed.num_experts, plan.pairs)
        calls = kernels.grouped_gemm.grouped_gate_up(
            x=x, order=order, tiles=tiles, weight=packed, bias=experts.packed_bias, out=out, plan=plan,
            **experts.limits,
        )  # fmt: skip
        walker.run(*calls)
    return out


def run_down(
    walker: Walker, experts: Experts, activated: torch.Tensor, ids: torch.Tensor, plan: GroupedPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighed products, and their sums by row."""
    packed = experts.packed
    out = torch.full((*ids.shape, packed.rows), float(FILL))
    total = torch.full((ids.shape[0], packed.rows), torch.nan)
    with walked(walker) as modules:
        kernels = named(modules)
        order, tiles = grouped(walker, kernels, ids, packed.num_experts, plan.pairs)
        calls = kernels.grouped_gemm.grouped_down(
            activated=activated, order=order, tiles=tiles, expert_weights=shares_of(ids), weight=packed,
            bias=experts.bias, out=out, plan=plan,
        )  # fmt: skip
        calls += kernels.topk_sum.add_topk(partials=out, expert_ids=ids, out=total)
        walker.run(*calls)
    return out, total


@pytest.mark.parametrize(
    ("late", "kind", "rows", "top_k", "quantised", "plan"),
    [
        (True, "random", 5, 2, True, GroupedPlan(16, 2, 3, 1)),
        (False, "shared", 19, 1, True, GroupedPlan(16, 1, 2, 1)),
        (True, "dead", 20, 2, True, GroupedPlan(32, 1, 4, 2)),
        (True, "random", 6, 2, False, GroupedPlan(16, 1, 3, 1)),
    ],
)
def test_gate_up_is_the_reference_s(
    late: bool, kind: str, rows: int, top_k: int, quantised: bool, plan: GroupedPlan
) -> None:
    """Three tiles of weights, so of the last two one is missing; five steps; tiles of pairs that are full and that hold
    fewer; experts that nobody chose."""
    experts = make_experts(4, 48, 288, quantised=quantised, gated=True)
    x, ids = torch.randn(rows, 288).bfloat16(), choices(kind, rows, top_k, 4)
    got = run_gate_up(Walker(late), experts, x, ids, plan)
    want = want_gate_up(experts, x, ids)
    assert (got[ids < 0] == FILL).all()
    torch.testing.assert_close(got[ids >= 0], want[ids >= 0], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("late", "kind", "rows", "quantised", "width", "depth", "plan"),
    [
        (True, "random", 3, True, 40, 160, GroupedPlan(16, 1, 3, 1)),
        (False, "dead", 4, True, 60, 64, GroupedPlan(16, 2, 4, 1)),
        (True, "shared", 37, True, 20, 96, GroupedPlan(32, 1, 2, 2)),
        (True, "apart", 2, False, 36, 72, GroupedPlan(16, 1, 3, 1)),
    ],
)
def test_down_is_the_reference_s(
    late: bool, kind: str, rows: int, quantised: bool, width: int, depth: int, plan: GroupedPlan
) -> None:
    """Columns that fill no step, rows that fill no tile, more stages than steps; dead pairs are neither read nor
    written."""
    experts = make_experts(4, width, depth, quantised=quantised, gated=False)
    ids = choices(kind, rows, 2, 4)
    activated = torch.randn(rows, 2, depth).bfloat16()
    activated[ids < 0] = torch.nan
    got, total = run_down(Walker(late), experts, activated, ids, plan)
    want = want_down(experts, torch.nan_to_num(activated), ids)
    assert (got[ids < 0] == FILL).all()
    torch.testing.assert_close(got[ids >= 0], want[ids >= 0], rtol=1e-5, atol=1e-5)
    summed = torch.zeros_like(total)
    for k in range(2):
        summed += torch.where(ids[:, k, None] >= 0, got[:, k], 0)
    assert torch.equal(total, summed)


@pytest.mark.parametrize("name", ["fp8", "int4_32_zeros", wide("fp8_block narrow"), wide("nvfp4")])
def test_quantised_experts_multiply_as_the_numbers_that_they_hold(name: str) -> None:
    """Groups' scales are in the numbers, which are rounded to bf16; those of rows in the epilogue, and in no number."""
    up = make_experts(3, 32, 192, quantised=name, gated=True, biased=False)
    down = make_experts(3, 36, 192, quantised=name, gated=False)
    ids, plan = choices("random", 3, 2, 3), GroupedPlan(16, 1, 3, 1)
    x, activated = torch.randn(3, 192).bfloat16(), torch.randn(3, 2, 192).bfloat16()
    got = run_gate_up(Walker(), up, x, ids, plan), run_down(Walker(), down, activated, ids, plan)[0]
    if up.packed.row_scales is None:
        for each in (up, down):
            numbers = torch.stack([unpack_expert(each.packed, expert) for expert in range(3)])
            assert torch.equal(numbers, each.matrices["weight"].bfloat16())
            each.packed = pack_experts({"weight": numbers}, order=each.order)
        assert torch.equal(got[0], run_gate_up(Walker(), up, x, ids, plan))
        assert torch.equal(got[1], run_down(Walker(), down, activated, ids, plan)[0])
    else:
        torch.testing.assert_close(got[0], want_gate_up(up, x, ids), rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(got[1], want_down(down, activated, ids), rtol=1e-5, atol=1e-6)


def test_a_pair_has_the_same_bits_in_any_company() -> None:
    """In tiles of any size, at any place in them, next to inputs that are no numbers."""
    experts = make_experts(3, 16, 96, quantised=True, gated=False)
    row, ids = torch.randn(1, 1, 96).bfloat16(), torch.tensor([[2]], dtype=torch.int32)
    alone, _ = run_down(Walker(), experts, row, ids, GroupedPlan(16, 1, 2, 1))
    for plan in (GroupedPlan(16, 1, 3, 1), GroupedPlan(32, 1, 2, 2)):
        activated = torch.full((27, 1, 96), torch.nan, dtype=torch.bfloat16)
        others = torch.full((27, 1), 2, dtype=torch.int32)
        activated[21] = row[0]
        got, _ = run_down(Walker(), experts, activated, others, plan)
        assert torch.equal(got[21], alone[0])


def test_every_code_at_every_scale_is_exact() -> None:
    """Products with columns of one number that is 1; lanes meet scales that take one factor, and that take two."""
    packed = all_codes_and_scales()
    matrix = unpack_expert(packed, 0)
    packed = replace(packed, rows=192)  # with the last tile's row of zeros
    experts = Experts({}, packed, torch.zeros(1, 192).bfloat16(), None)
    picked = [0, 9, 37, 63]
    activated = torch.zeros(4, 1, 64).bfloat16()
    for row, column in enumerate(picked):
        activated[row, 0, column] = 1
    got, _ = run_down(Walker(), experts, activated, torch.zeros(4, 1, dtype=torch.int32), GroupedPlan(16, 2, 2, 1))
    assert torch.equal(got[:, 0, :191], matrix[:, picked].float().T) and not got[:, 0, 191].any()


def test_tiles_suit_the_pairs_and_plans_the_gpus() -> None:
    assert [tile_pairs_of(4 * rows, 128) for rows in (1, 128, 512, 1024, 2048, 9000)] == [16, 16, 32, 64, 96, 96]
    assert most_tiles(8192, 128, 96) == 85 + 128 and most_tiles(4, 128, 16) == 4
    for gpu in (*GPUS.values(), B200):
        for quantised in (True, False):
            for kind, rows in ((GATE_UP, 5760), (DOWN, 2880)):
                shape = ExpertShape(kind, rows, 2880, 4, MXFP4 if quantised else BF16)
                for pairs in (16, 32, 64, 96):
                    plan = plan_grouped(pairs, shape, gpu)
                    assert plan.stages >= 2 and plan.shared_bytes(shape) <= gpu.shared_bytes
    shape = ExpertShape(DOWN, 64, 64, 4, MXFP4)
    with pytest.raises(ShapeError, match="does not fit the 8192 bytes"):
        plan_grouped(16, shape, Gpu(132, 8192, (9, 0)))
    with pytest.raises(ShapeError, match="tiles of 24 pairs; a multiple of 16, at most 128"):
        plan_grouped(24, shape, H200)
    with pytest.raises(ShapeError, match="tiles of 16 pairs, of which 32 are left out"):
        GroupedPlan(16, 4, 4, 4)
