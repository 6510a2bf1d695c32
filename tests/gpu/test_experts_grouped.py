"""Grouped products of experts against the reference and float64, and a pair's bits in any company and tiles."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import (
    ALPHA,
    FORMATS,
    LIMIT,
    Experts,
    all_codes_and_scales,
    choices,
    make_experts,
    shares_of,
    want_down,
    want_gate_up,
)
from moe_cases import Poisoned

from lowlat.executors.launcher import Launcher
from lowlat.kernels.moe.packing import pack_experts, unpack_expert
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill import experts as by_gpu
from lowlat.kernels.moe.prefill.experts import prefill_down, prefill_experts, prefill_gate_up
from lowlat.kernels.moe.prefill.grouped_gemm import grouped_down, grouped_gate_up
from lowlat.kernels.moe.prefill.grouping import group_pairs
from lowlat.kernels.moe.prefill.pair_tiles import TILE_PAIRS, most_tiles
from lowlat.kernels.moe.prefill.plan import GroupedPlan, plan_grouped
from lowlat.kernels.moe.topk_sum import add_topk

FILL = -77


def groups(launcher: Launcher, ids: torch.Tensor, num_experts: int, tile_pairs: int) -> dict[str, torch.Tensor]:
    count = ids.numel()
    order = torch.full((count,), FILL, dtype=torch.int32, device="cuda")
    tiles = torch.full((most_tiles(count, num_experts, tile_pairs), 4), FILL, dtype=torch.int32, device="cuda")
    lists = {"order": order, "tiles": tiles}
    launcher.run(*group_pairs(expert_ids=ids, num_experts=num_experts, tile_pairs=tile_pairs, **lists))
    return lists


def plan_of(
    launcher: Launcher, kind: str, experts: Experts, ids: torch.Tensor, tile_pairs: int, **changes: int
) -> GroupedPlan:
    packed = experts.packed
    shape = ExpertShape(kind, packed.rows, packed.columns, ids.shape[1], packed.format)
    return plan_grouped(tile_pairs, shape, launcher.gpu, **changes)


def run_gate_up(
    launcher: Launcher, experts: Experts, x: torch.Tensor, ids: torch.Tensor, tile_pairs: int, **changes: int
) -> torch.Tensor:
    packed = experts.packed
    out = torch.full((*ids.shape, packed.rows // 2), FILL, device="cuda", dtype=torch.bfloat16)
    bias = experts.packed_bias
    plan = plan_of(launcher, GATE_UP, experts, ids, tile_pairs, **changes)
    lists: dict[str, Any] = groups(launcher, ids, packed.num_experts, tile_pairs)
    launcher.run(*grouped_gate_up(x=x, **lists, weight=packed, bias=bias, out=out, **experts.limits, plan=plan))
    return out


def run_down(
    launcher: Launcher, experts: Experts, activated: torch.Tensor, ids: torch.Tensor, tile_pairs: int, **changes: int
) -> torch.Tensor:
    packed = experts.packed
    out = torch.full((*ids.shape, packed.rows), float(FILL), device="cuda")
    plan = plan_of(launcher, DOWN, experts, ids, tile_pairs, **changes)
    lists: dict[str, Any] = groups(launcher, ids, packed.num_experts, tile_pairs)
    calls = grouped_down(
        activated=activated, **lists, expert_weights=shares_of(ids), weight=packed, bias=experts.bias, out=out,
        plan=plan,
    )  # fmt: skip
    launcher.run(*calls)
    return out


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("rows", "top_k", "num_experts", "kind"),
    [
        (1, 4, 128, "random"),
        (2048, 4, 128, "random"),
        (700, 4, 128, "shared"),
        (999, 2, 512, "dead"),
        (5, 4, 9, "none"),
        (900, 11, 513, "random"),
    ],
)
def test_pairs_are_grouped_by_expert(launcher: Launcher, rows: int, top_k: int, num_experts: int, kind: str) -> None:
    ids = choices(kind, rows, top_k, num_experts, "cuda")
    flat = ids.view(-1).long()
    want = torch.where(flat < 0, num_experts, flat).sort(stable=True)[1][: int((flat >= 0).sum())]
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts).tolist()
    for tile_pairs in TILE_PAIRS:
        lists, place, tiles = groups(launcher, ids, num_experts, tile_pairs), 0, []
        for expert, count in enumerate(counts):
            size = min(tile_pairs, max(8, -(-count // max(1, -(-count // tile_pairs)) // 8) * 8))
            tiles += [[expert, place + cut, min(size, count - cut), 0] for cut in range(0, count, size)]
            place += count
        assert torch.equal(lists["order"][: len(want)].long(), want)
        assert lists["tiles"][: len(tiles)].tolist() == tiles and not lists["tiles"][len(tiles) :].any()


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "width", "depth"), [(4, 4, 192, 96), (32, 4, 5760, 2880), (8, 2, 352, 2080)]
)
def test_gate_up_is_the_reference_s(
    launcher: Launcher, quantised: bool, num_experts: int, top_k: int, width: int, depth: int
) -> None:
    experts = make_experts(num_experts, width, depth, quantised=quantised, gated=True, device="cuda")
    for tile_pairs, rows in ((16, 3), (32, 40), (64, 150), (96, 260)):
        x = torch.randn(rows, depth, device="cuda").bfloat16()
        for kind in ("random", "shared", "dead"):
            ids = choices(kind, rows, top_k, num_experts, "cuda")
            got, live = run_gate_up(launcher, experts, x, ids, tile_pairs), ids >= 0
            assert (got[~live] == FILL).all()
            assert apart(got[live], want_gate_up(experts, x, ids)[live]) < 4e-3, (tile_pairs, kind)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_experts_multiply_as_the_numbers_that_they_hold(launcher: Launcher, name: str) -> None:
    """Groups' scales are in the numbers, which are rounded to bf16; those of rows in the epilogue, and in no number."""
    up = make_experts(128, 1536, 2048, quantised=name, gated=True, device="cuda", biased=False)
    down = make_experts(128, 2048, 768, quantised=name, gated=False, device="cuda", biased=False)
    for rows, tile_pairs in ((40, 16), (600, 96)):
        ids, x = choices("random", rows, 8, 128, "cuda"), torch.randn(rows, 2048, device="cuda").bfloat16()
        activated = torch.randn(rows, 8, 768, device="cuda").bfloat16()
        got = run_gate_up(launcher, up, x, ids, tile_pairs), run_down(launcher, down, activated, ids, tile_pairs)
        if up.packed.row_scales is None:
            plain = [
                replace(each, packed=pack_experts({"weight": each.matrices["weight"].bfloat16()}, order=each.order))
                for each in (up, down)
            ]
            assert torch.equal(got[0], run_gate_up(launcher, plain[0], x, ids, tile_pairs))
            assert torch.equal(got[1], run_down(launcher, plain[1], activated, ids, tile_pairs))
        elif rows < 100:
            assert apart(got[0], want_gate_up(up, x, ids)) < 4e-3
            assert apart(got[1], want_down(down, activated, ids)) < 1e-5


@pytest.mark.parametrize("rows", [5, 128, 600])
def test_a_down_gemm_stands_alone_or_behind_the_gate_up_gemm(launcher: Launcher, rows: int) -> None:
    """Where it groups pairs for itself it has the bits of one that takes the gate_up GEMM's lists."""
    up = make_experts(16, 640, 352, quantised=True, gated=True, device="cuda")
    down = make_experts(16, 96, 320, quantised=True, gated=False, device="cuda")
    assert up.order is not None
    x, gpu, chain = torch.randn(rows, 352, device="cuda").bfloat16(), launcher.gpu, Poisoned("cuda")
    for kind in ("random", "shared", "dead"):
        ids = choices(kind, rows, 4, 16, "cuda")
        shares, activated = shares_of(ids), torch.full((rows, 4, 320), torch.nan, device="cuda").bfloat16()
        outs = torch.full((2, rows, 96), torch.nan, device="cuda")
        bias = up.packed_bias
        calls = prefill_gate_up(
            x, ids, experts=up.packed, bias=bias, out=activated, limit=LIMIT, alpha=ALPHA, workspace=chain, gpu=gpu
        )
        rest: dict[str, Any] = {"experts": down.packed, "bias": down.bias, "gpu": gpu}
        calls += prefill_down(activated, ids, shares, **rest, out=outs[0], workspace=chain, grouped=True)
        calls += prefill_down(activated, ids, shares, **rest, out=outs[1], workspace=Poisoned("cuda"))
        launcher.run(*calls)
        live = ids >= 0
        assert apart(activated[live], want_gate_up(up, x, ids)[live]) < 4e-3
        assert torch.equal(outs[0], outs[1]) and bool(outs[0][live.any(1)].ne(0).any(1).all())
        assert not outs[0][~live.any(1)].any()


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "width", "depth"), [(4, 4, 100, 96), (32, 4, 2880, 2880), (8, 2, 40, 2080)]
)
def test_down_is_float64_s(
    launcher: Launcher, quantised: bool, num_experts: int, top_k: int, width: int, depth: int
) -> None:
    """Dead pairs are neither read nor written; what is added up by row is the reference's sum, bit for bit."""
    experts = make_experts(num_experts, width, depth, quantised=quantised, gated=False, device="cuda")
    bias = experts.bias
    assert bias is not None
    matrices = torch.stack([unpack_expert(experts.packed, expert) for expert in range(num_experts)])
    for tile_pairs, rows in ((16, 3), (32, 40), (64, 150), (96, 260)):
        for kind in ("random", "shared", "dead"):
            ids = choices(kind, rows, top_k, num_experts, "cuda")
            activated, live = torch.randn(rows, top_k, depth, device="cuda").bfloat16(), ids >= 0
            activated[~live] = torch.nan
            got = run_down(launcher, experts, activated, ids, tile_pairs)
            assert (got[~live] == FILL).all()
            want, shares = torch.zeros_like(got, dtype=torch.float64), shares_of(ids).double()
            for expert in range(num_experts):
                mine = ids == expert
                products = activated[mine].double() @ matrices[expert].double().T + bias[expert].double()
                want[mine] = shares[mine][:, None] * products
            assert apart(got[live], want[live]) < 1e-5, (tile_pairs, kind)
            total, summed = torch.full((2, rows, width), torch.nan, device="cuda")
            launcher.run(*add_topk(partials=got, expert_ids=ids, out=total))
            summed.zero_()
            for k in range(top_k):
                summed += torch.where(live[:, k, None], got[:, k], 0)
            assert torch.equal(total, summed)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("gated", "width", "depth"), [(True, 5760, 2880), (False, 2880, 2880), (False, 100, 96)])
def test_a_pair_has_the_same_bits_in_any_company(
    launcher: Launcher, quantised: bool, gated: bool, width: int, depth: int
) -> None:
    """Alone, next to inputs that are no numbers, in tiles, blocks and pipelines of every size."""
    experts = make_experts(8, width, depth, quantised=quantised, gated=gated, device="cuda")
    run: Any = run_gate_up if gated else run_down
    own, ids = torch.randn(1, 4, depth, device="cuda").bfloat16(), choices("random", 1, 4, 8, "cuda")
    own = own[:, 0] if gated else own
    alone = run(launcher, experts, own, ids, 16)
    for rows in (9, 70, 300):
        for kind in ("random", "shared"):
            inputs = torch.full((rows, *own.shape[1:]), torch.nan, dtype=torch.bfloat16, device="cuda")
            others = choices(kind, rows, 4, 8, "cuda")
            place = int(torch.randint(rows, (1,)))
            inputs[place], others[place] = own[0], ids[0]
            for tile_pairs in TILE_PAIRS:
                for changes in ({}, {"warps": 8}, {"stages": 2}):
                    assert torch.equal(run(launcher, experts, inputs, others, tile_pairs, **changes)[place], alone[0])


@pytest.mark.parametrize(
    ("held", "num_experts", "sizes"),
    [(True, 8, (5760, 2880, 4)), ("fp8_block", 16, (1536, 2048, 8)), (False, 4, (256, 192, 2))],
)
def test_warpgroups_have_the_bits_of_the_other_gemms(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, held: Any, num_experts: int, sizes: tuple[int, int, int]
) -> None:
    """An MoE layer's pairs may go to either, by how many they are: tiles of one size and of two, rows with dead
    pairs.
    """
    if launcher.gpu.capability != (9, 0):
        pytest.skip("GEMMs by warpgroups are for capability 9.0")
    width, depth, top_k = sizes
    up = make_experts(num_experts, width, depth, quantised=held, gated=True, device="cuda", biased=held is True)
    down = make_experts(num_experts, depth, width // 2, quantised=held, gated=False, device="cuda", biased=held is True)
    for rows, kind in ((40, "random"), (230, "shared"), (700, "dead"), (1500, "random")):
        ids, x = choices(kind, rows, top_k, num_experts, "cuda"), torch.randn(rows, depth, device="cuda").bfloat16()
        if kind == "random":
            ids[3:30, 1:] = -1
        outs = torch.full((2, rows, depth), torch.nan, device="cuda")
        for out, answer in zip(outs, (True, False), strict=True):
            monkeypatch.setattr(by_gpu, "takes_warpgroups", lambda *_, answer=answer: answer)
            activated = torch.full((rows, top_k, width // 2), torch.nan, device="cuda").bfloat16()
            calls = prefill_experts(
                x, ids, shares_of(ids), gate_up=up.packed, gate_up_bias=up.packed_bias, down=down.packed,
                down_bias=down.bias, activated=activated, out=out, **up.limits, workspace=Poisoned("cuda"),
                gpu=launcher.gpu,
            )  # fmt: skip
            launcher.run(*calls)
        assert apart(*outs) < 1e-5, (rows, kind)
        assert torch.equal(*outs), (rows, kind)


def test_every_code_at_every_scale_is_exact(launcher: Launcher) -> None:
    packed = all_codes_and_scales("cuda")
    rows = packed.rows // 4 * 4
    matrix = unpack_expert(packed, 0)[:rows]
    held = replace(packed, rows=rows)
    experts = Experts({}, held, torch.zeros(1, rows, device="cuda").bfloat16(), None)
    activated = torch.eye(64, device="cuda").bfloat16()[:, None]
    ids = torch.zeros(64, 1, dtype=torch.int32, device="cuda")
    for tile_pairs in TILE_PAIRS:
        assert torch.equal(run_down(launcher, experts, activated, ids, tile_pairs)[:, 0], matrix.float().T)


def test_limits_and_infinities(launcher: Launcher) -> None:
    """Products past the limits are clamped as the reference does; what is not a number stays so, in its row alone."""
    experts = make_experts(4, 192, 96, quantised=True, gated=True, device="cuda", scales=(126, 134))
    x, ids = torch.randn(40, 96, device="cuda").bfloat16() * 100, choices("random", 40, 4, 4, "cuda")
    x[1, 5] = torch.nan
    got, want = run_gate_up(launcher, experts, x, ids, 32), want_gate_up(experts, x, ids)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=1e-6, equal_nan=True)
    assert got[1].isnan().all()
    assert got[2:].isfinite().all()
