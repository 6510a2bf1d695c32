"""A mixture of experts in one launch: what it chooses, both products and their sum against the reference and float64, a
row's bits in any company and however the products are cut, extremes, and many after each other without a wait."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import FORMATS, want_gate_up
from moe_cases import (
    PASSES,
    Moe,
    Poisoned,
    make_logits,
    make_moe,
    make_topk_routing,
    of_codes,
    passing,
    want_routing,
)

from lowlat.executors.launcher import Launcher
from lowlat.kernels.moe.decode.experts import experts_down, experts_gate_up
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.moe.decode.mlp_plan import MlpPlan
from lowlat.kernels.moe.packing import unpack_expert
from lowlat.kernels.moe.plan import partials_workspace
from lowlat.kernels.moe.router import RouterNorm, router_logits
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.toolchain.kernel import KernelCall

ROWS = (1, 2, 3, 8, 17, 70)
RESULTS = ("expert_ids", "expert_weights", "activated", "partials", "total")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals NaN there."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def run(
    launcher: Launcher, moe: Moe, x: torch.Tensor, routing: TopKRouting, top_k: int, *,
    plan: MlpPlan | None = None, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return inputs and outputs by the launch's argument names."""
    found = moe.arguments(x, top_k) | changes
    launcher.run(*experts_mlp(routing=routing, gpu=launcher.gpu, plan=plan, **found))
    return found


def compile_ahead(
    launcher: Launcher, moe: Moe, top_k: int, sizes: tuple[int, ...], plans: tuple[MlpPlan, ...] = (), *,
    shared: bool = False,
) -> None:  # fmt: skip
    """Compile the kernels of launches over these rows, and over one row by these plans, on all cores."""
    calls: list[KernelCall] = []
    count = moe.up.packed.num_experts
    for rows, plan in [*((rows, None) for rows in sizes), *((1, plan) for plan in plans)]:
        routing, arguments = (
            make_topk_routing("random", rows, top_k, count, "cuda", shared=shared),
            moe.arguments(moe.rows(rows), top_k),
        )
        calls += experts_mlp(routing=routing, gpu=launcher.gpu, plan=plan, **arguments)
    launcher.compile_ahead(calls)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner"), [(4, 4, 96, 160), (128, 4, 160, 64), (32, 4, 2880, 2880), (8, 2, 2080, 320)]
)
def test_products_and_their_sum_are_right(
    launcher: Launcher, quantised: bool, count: int, top_k: int, hidden: int, inner: int
) -> None:
    """All ways to choose, dead rows and such that choose by NaN among them, at every number of rows and at more than a
    launch takes."""
    moe = make_moe(count, hidden, inner, quantised=quantised, device="cuda")
    compile_ahead(launcher, moe, top_k, ROWS)
    for rows in ROWS:
        for kind in ("random", "shared", "apart", "ties", "odd", "dead", "none"):
            routing = make_topk_routing(kind, rows, top_k, count, "cuda")
            found = run(launcher, moe, moe.rows(rows), routing, top_k)
            wanted, about = want_routing(routing, top_k)
            assert torch.equal(found["expert_ids"].cpu(), wanted), (rows, kind)
            torch.testing.assert_close(found["expert_weights"].cpu(), about, rtol=1e-5, atol=1e-7, equal_nan=True)
            moe.check(found)
            assert kind == "odd" or found["total"].isfinite().all()


def run_alone(launcher: Launcher, found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Both GEMMs in launches of their own, over what the one launch was given and chose."""
    ids, given = found["expert_ids"], found["activated"]
    activated, workspace = torch.full_like(given, torch.nan), Poisoned("cuda")
    out = torch.full(found["total"].shape, torch.nan, device="cuda")
    calls = experts_gate_up(
        found["x"], ids, experts=found["gate_up"], bias=found["gate_up_bias"], out=activated, gpu=launcher.gpu,
        **{name: found[name] for name in ("limit", "alpha") if name in found},
    )  # fmt: skip
    calls += experts_down(
        activated, ids, found["expert_weights"], experts=found["down"], bias=found["down_bias"], out=out,
        workspace=workspace, gpu=launcher.gpu,
    )  # fmt: skip
    launcher.run(*calls)
    total = (found["residual"].float() + out).bfloat16()
    partials = workspace(*partials_workspace(ids.shape[0], ids.shape[1], out.shape[1]))
    return {"activated": activated, "partials": partials, "total": total}


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("count", "hidden", "inner"), [(4, 96, 160), (32, 2880, 2880), (128, 2080, 320)])
def test_gemms_alone_have_the_bits_of_the_one_launch(
    launcher: Launcher, quantised: bool, count: int, hidden: int, inner: int
) -> None:
    """At every number of rows, whoever shares experts; dead rows among them."""
    moe = make_moe(count, hidden, inner, quantised=quantised, device="cuda")
    compile_ahead(launcher, moe, 4, ROWS)
    for rows in ROWS:
        for kind in ("random", "shared", "apart", "dead"):
            routing = make_topk_routing(kind, rows, 4, count, "cuda")
            found = run(launcher, moe, moe.rows(rows), routing, 4)
            for name, alone in run_alone(launcher, found).items():
                assert torch.equal(bits(alone), bits(found[name])), (name, rows, kind)


@pytest.mark.parametrize(("name", "over_all"), [(False, True), *((name, False) for name in (False, *FORMATS))])
def test_experts_of_dense_formats_without_biases(launcher: Launcher, name: str | bool, over_all: bool) -> None:
    """Eight of 128 experts of Qwen3-30B-A3B's sizes: right, and each GEMM alone has the same bits."""
    moe = make_moe(128, 2048, 768, quantised=name, device="cuda", biased=False)
    compile_ahead(launcher, moe, 8, (1, 9))
    for rows in (1, 9):
        routing = replace(make_topk_routing("random", rows, 8, 128, "cuda"), over_all=over_all)
        found = run(launcher, moe, moe.rows(rows), routing, 8)
        ids = found["expert_ids"].long()
        assert torch.equal(found["expert_ids"].cpu(), want_routing(routing, 8)[0])
        shares = routing.logits.softmax(1).gather(1, ids) if over_all else routing.logits.gather(1, ids).softmax(1)
        torch.testing.assert_close(found["expert_weights"], shares, rtol=1e-5, atol=1e-7)
        moe.check(found)
        for part, alone in run_alone(launcher, found).items():
            assert torch.equal(bits(alone), bits(found[part])), (part, rows)


@pytest.mark.parametrize(("count", "top_k"), [(257, 9), (513, 11)])
@pytest.mark.parametrize("name", [False, True, *FORMATS])
def test_a_shared_expert_is_one_more_of_every_row(launcher: Launcher, name: str | bool, count: int, top_k: int) -> None:
    """Sizes of Qwen3.6-35B-A3B and Qwen3-Coder-Next: right, each GEMM alone has the same bits, and so has a row alone;
    one list of pairs a lane, of two, and of many."""
    moe = make_moe(count, 2048, 512, quantised=name, device="cuda", biased=False)
    compile_ahead(launcher, moe, top_k, (1, 3, 4, 9, 40), shared=True)
    for rows in (1, 3, 4, 9, 40):
        for kind in ("random", "shared", "apart", "dead"):
            routing = make_topk_routing(kind, rows, top_k, count, "cuda", shared=True)
            found = run(launcher, moe, moe.rows(rows), routing, top_k)
            wanted, about = want_routing(routing, top_k)
            assert torch.equal(found["expert_ids"].cpu(), wanted), (rows, kind)
            torch.testing.assert_close(found["expert_weights"].cpu(), about, rtol=1e-5, atol=1e-7)
            moe.check(found)
            for part, alone in run_alone(launcher, found).items():
                assert torch.equal(bits(alone), bits(found[part])), (part, rows, kind)
            flags = None if routing.row_live is None else routing.row_live[:, -1:].contiguous()
            last = replace(routing, logits=routing.logits[-1:], row_live=flags)
            own = run(launcher, moe, found["x"][-1:], last, top_k, residual=found["residual"][-1:].clone())
            for part in RESULTS:
                assert torch.equal(bits(own[part]), bits(found[part][-1:])), (part, rows, kind)


@pytest.mark.parametrize("kind", ["random", "shared", "ties", "odd"])
@pytest.mark.parametrize(("count", "top_k"), [(5, 2), (256, 8), (70, 5), (512, 10)])
def test_what_logits_choose_is_the_reference_s(launcher: Launcher, kind: str, count: int, top_k: int) -> None:
    """Ids and shares, with flags and without, and a row's the same in any company."""
    moe = make_moe(count, 96, 32, device="cuda")
    for rows in (1, 5, 33):
        logits, x = make_logits(kind, rows, count).cuda(), moe.rows(rows)
        flags = (torch.arange(rows, device="cuda") % 3 != 1).to(torch.uint8).view(1, rows)
        for live in (None, flags):
            routing = TopKRouting(logits, live)
            found = run(launcher, moe, x, routing, top_k)
            wanted, about = want_routing(routing, top_k)
            assert torch.equal(found["expert_ids"].cpu(), wanted)
            torch.testing.assert_close(found["expert_weights"].cpu(), about, rtol=1e-5, atol=1e-7, equal_nan=True)
        own = {"residual": found["residual"][-1:].clone()}
        alone = run(launcher, moe, x[-1:], TopKRouting(logits[-1:], flags[:, -1:].contiguous()), top_k, **own)
        for name in RESULTS:
            assert torch.equal(bits(alone[name]), bits(found[name][-1:])), name


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(224, 96), (2880, 2880)])
def test_a_row_has_the_same_bits_in_any_company(launcher: Launcher, quantised: bool, hidden: int, inner: int) -> None:
    """Alone, next to rows that hold NaN, at any place, whoever shares its experts, and however the products are cut."""
    count, top_k = 16, 4
    moe = make_moe(count, hidden, inner, quantised=quantised, device="cuda")
    cuts: list[dict[str, int]] = [{"stages": 1}, {"num_blocks": 7}, {"part": 1, "num_blocks": 11}]
    plans = tuple(moe.plan(8, top_k, launcher.gpu, **cut) for cut in cuts)
    compile_ahead(launcher, moe, top_k, (1, 2, 8, 70), plans)
    row, own = moe.rows(1), make_topk_routing("random", 1, top_k, count, "cuda").logits
    alone = run(launcher, moe, row, TopKRouting(own), top_k)
    moe.check(alone)
    for rows, plan in [(2, None), (8, None), (70, None), *((8, plan) for plan in plans)]:
        for kind in ("random", "shared", "dead"):
            x, routing = (
                torch.full_like(row, torch.nan).repeat(rows, 1),
                make_topk_routing(kind, rows, top_k, count, "cuda"),
            )
            residual = torch.randn(rows, hidden, device="cuda").bfloat16()
            place = int(torch.randint(rows, (1,)))
            x[place], routing.logits[place], residual[place] = row[0], own[0], alone["residual"][0]
            if routing.row_live is not None:
                routing.row_live[0, place] = 1
            found = run(launcher, moe, x, routing, top_k, plan=plan, residual=residual)
            for name in RESULTS:
                assert torch.equal(bits(found[name][place]), bits(alone[name][0])), (name, rows, kind)


def test_limits_and_what_is_not_a_number(launcher: Launcher) -> None:
    """Products past the limits are clamped as the reference does; what is not a number stays so, in its row alone."""
    moe = make_moe(4, 96, 160, device="cuda", scales=(126, 134))
    x = moe.rows(3) * 100
    x[1, 5] = torch.nan
    found = run(launcher, moe, x, make_topk_routing("apart", 3, 4, 4, "cuda"), 4)
    want = want_gate_up(moe.up, x, found["expert_ids"])
    assert float(want[::2].max()) > 40  # of at most 56
    torch.testing.assert_close(found["activated"], want, rtol=2**-6, atol=0.1, equal_nan=True)
    for name in ("activated", "partials", "total"):
        assert found[name][1].isnan().all() and found[name][::2].isfinite().all()


@pytest.mark.parametrize(
    ("gated", "scale", "size"),
    [
        (False, 1, 1.0),
        (False, 2, 1.0),
        (False, 2, 2.0**60),
        (False, 191, 2.0**50),
        (False, 191, 2.0**-61),
        (False, 127, 2.0**60),
        (True, 1, 2.0**60),
        (True, 2, 2.0**60),
        (True, 191, 2.0**50),
        (True, 191, 2.0**-61),
        (True, 127, 2.0**60),
    ],
)
def test_every_code_at_the_extremes_of_scales(launcher: Launcher, gated: bool, scale: int, size: float) -> None:
    """One code a row of a matrix, all 16, in every column: one-hot rows give them back exactly. In the first product,
    whose gates pass where they are positive, they come with both signs; in the second it lets them through."""
    codes = torch.arange(64, dtype=torch.uint8, device="cuda").remainder(16)[:, None].expand(64, 64)
    experts, plain = of_codes(codes, scale, gated=gated), of_codes(codes, 127, gated=False)
    moe = Moe(experts, plain) if gated else Moe(passing(64, "cuda"), experts)
    matrix = unpack_expert(experts.packed, 0)[:64].double()
    hot = torch.eye(64, device="cuda").bfloat16() * size
    for x in (hot, -hot) if gated else (hot,):
        found = run(launcher, moe, x, TopKRouting(torch.zeros(64, 1, device="cuda")), 1, **PASSES)
        got, want = found["activated" if gated else "partials"][:, 0].double(), x.double() @ matrix.t()
        assert torch.equal(got, want.clamp(min=0) if gated else want)


@pytest.mark.parametrize("sizes", [(1,), (4,), (12,), (1, 8, 3, 70)])
def test_many_behind_each_other(launcher: Launcher, sizes: tuple[int, ...]) -> None:
    """Layers without a wait between them, which leave logits, rows and what is awaited in the same places, and choose
    while the router still runs; of one bucket, or of several that take turns. The sum of each is the next residual."""
    layers, width, count, most = 240, 576, 32, max(sizes)
    moe = make_moe(count, width, width, device="cuda")
    x = torch.randn(layers, most, width, device="cuda").bfloat16()
    weight = (torch.randn(layers, count, width, device="cuda") / 8).bfloat16()
    zeros, ones = torch.zeros(count, device="cuda").bfloat16(), torch.ones(width, device="cuda").bfloat16()
    live = torch.ones(1, most, dtype=torch.uint8, device="cuda")
    live[0, 1::3] = 0
    start, found = torch.randn(most, width, device="cuda").bfloat16(), []
    for apart in (True, False):
        normed = torch.full((most, width), torch.nan, device="cuda").bfloat16()
        logits = torch.full((2, most, count), torch.nan, device="cuda")
        shared, outs, launches = moe.arguments(x[0], 4), [start], []
        chosen, kept = [], []  # launches know addresses alone
        for layer in range(layers):
            rows = sizes[layer % len(sizes)]
            flags, results = live[:, :rows].contiguous(), moe.arguments(normed[:rows], 4)
            results |= {name: shared[name][:rows] for name in ("activated", "partials")}
            total = start.clone()
            results |= {"residual": outs[-1][:rows], "total": total[:rows]}
            kept.append((flags, results))
            own, following = logits[layer % 2, :rows], logits[(layer + 1) % 2, : sizes[(layer + 1) % len(sizes)]]
            norm = RouterNorm(ones, 1e-5, normed[:rows], flags)
            calls = router_logits(
                x[layer, :rows], weight[layer], zeros, norm=norm, logits=own,
                awaited=(results["activated"], results["partials"], following), gpu=launcher.gpu,
            )  # fmt: skip
            calls += experts_mlp(routing=TopKRouting(own, flags), early=layer > 0, gpu=launcher.gpu, **results)
            launches += [launcher.prepare(call) for call in calls]
            outs.append(total)
            chosen.append(results["expert_ids"])
        torch.cuda.synchronize()
        for launch in launches:
            launch.issue(launcher.stream())
            if apart:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found.append((torch.stack(outs), chosen))
    assert found[0][0].isfinite().all() and len(torch.unique(torch.cat([each.flatten() for each in found[0][1]]))) > 8
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0][1], found[1][1], strict=True))
