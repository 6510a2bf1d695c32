"""The logits that experts are chosen by, on a GPU: promised bits, and a row's in any company; and what is awaited."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_cases import Poisoned, make_topk_routing, want_routing
from rowwise_cases import (
    EPS,
    Lab,
    check_router,
    check_router_alone,
    check_router_extremes,
    check_router_fills,
    route,
    router_inputs,
    same_bits,
)

from lowlat.kernels.gemm.prefill.narrow_gemm import narrow_gemm
from lowlat.kernels.moe.router import RouterNorm, prefill_router, router
from lowlat.kernels.moe.topk_routing import TopKRouting, route_top_k


@pytest.mark.parametrize(("width", "experts"), [(2880, 128), (2880, 32), (8, 3), (6144, 256), (2048, 513)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 17, 64])
def test_the_router_in_its_promised_order(lab: Lab, rows: int, width: int, experts: int) -> None:
    check_router(lab, rows, width, experts)


@pytest.mark.parametrize(("width", "experts"), [(2880, 128), (8, 3), (6144, 256), (2048, 257)])
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 513])
def test_a_router_of_normed_rows_has_the_bits_of_norm_and_router_together(
    lab: Lab, rows: int, width: int, experts: int
) -> None:
    """Its logits, and what rows choose by them in launches of its own."""
    check_router_alone(lab, rows, width, experts)
    given: dict[str, Any] = {name: lab.place(each) for name, each in router_inputs(rows, width, experts).items()}
    norm_weight, live, x = given.pop("norm_weight"), given["row_live"], given.pop("x")
    together = route(lab, {**given, "x": x, "norm_weight": norm_weight})
    found = []
    for apart in (None, True, False):
        ids = torch.full((rows, 3), 77, dtype=torch.int32, device=lab.device)
        shares, normed = torch.full((rows, 3), torch.nan, device=lab.device), torch.full_like(x, torch.nan)
        chosen: dict[str, Any] = {"expert_ids": ids, "expert_weights": shares}
        if apart is None:
            calls = route_top_k(routing=TopKRouting(together["logits"], live), **chosen)
        elif apart:
            calls = router(together["normed"], **given, **chosen, workspace=Poisoned(lab.device))
        else:
            norm = RouterNorm(norm_weight, EPS, normed, live)
            calls = router(x, **given, **chosen, norm=norm, workspace=Poisoned(lab.device))
        lab.run(*calls)
        found.append((ids, shares))
    for ids, shares in found[1:]:
        assert torch.equal(ids, found[0][0]) and torch.equal(shares, found[0][1])


@pytest.mark.parametrize(("width", "experts", "shared"), [(2880, 128, False), (2048, 257, True), (8, 3, False)])
@pytest.mark.parametrize("rows", [64, 2048])
def test_a_prompt_s_rows_choose_by_their_narrow_product(
    lab: Lab, rows: int, width: int, experts: int, shared: bool
) -> None:
    """Close to a step's logits; two experts that are alike have equal ones, and dead rows choose none."""
    given: dict[str, Any] = {name: lab.place(each) for name, each in router_inputs(rows, width, experts).items()}
    together = route(lab, given)
    del given["norm_weight"]
    given["x"] = together["normed"]
    chosen: dict[str, Any] = {
        "expert_ids": torch.full((rows, 3), 77, dtype=torch.int32, device=lab.device),
        "expert_weights": torch.full((rows, 3), torch.nan, device=lab.device),
    }
    lab.run(*prefill_router(**given, **chosen, shared=shared, workspace=Poisoned(lab.device)))
    logits = torch.full((rows, experts), torch.nan, device=lab.device)
    lab.run(*narrow_gemm(given["x"], given["weight"], given["bias"], out=logits, workspace=Poisoned(lab.device)))
    assert torch.equal(logits[:, -1], logits[:, experts // 2])
    step = together["logits"].double()
    assert float((logits.double() - step).norm()) <= 1e-5 * float(step.norm())
    ids, shares = want_routing(TopKRouting(logits, given["row_live"], shared=shared), 3)
    assert torch.equal(chosen["expert_ids"].cpu(), ids)
    torch.testing.assert_close(chosen["expert_weights"].cpu(), shares, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("top_k", "experts"), [(9, 257), (11, 513), (2, 2)])
@pytest.mark.parametrize("kind", ["random", "ties", "odd", "dead"])
def test_every_row_takes_a_shared_expert_last(lab: Lab, kind: str, top_k: int, experts: int) -> None:
    """As the reference has it; the others are chosen without it, and their shares have the same bits."""
    for rows in (1, 4, 700):
        for over_all in (False, True):
            routing = make_topk_routing(kind, rows, top_k, experts, str(lab.device), shared=True)
            routing = replace(routing, over_all=over_all)
            alone = replace(routing, logits=routing.logits[:, :-1].contiguous(), shared=False)
            found = []
            for each, count in ((routing, top_k), (alone, top_k - 1)):
                ids = torch.full((rows, count), 77, dtype=torch.int32, device=lab.device)
                shares = torch.full((rows, count), torch.nan, device=lab.device)
                lab.run(*route_top_k(routing=each, expert_ids=ids, expert_weights=shares))
                found.append((ids.cpu(), shares.cpu()))
            (ids, shares), (others, weights) = found
            wanted, about = want_routing(routing, top_k)
            assert torch.equal(ids, wanted)
            torch.testing.assert_close(shares, about, rtol=1e-5, atol=1e-7, equal_nan=True)
            assert torch.equal(ids[:, :-1], others) and same_bits(shares[:, :-1].contiguous(), weights)


@pytest.mark.parametrize("width", [64, 2880])
def test_what_is_not_finite(lab: Lab, width: int) -> None:
    check_router_extremes(lab, width)


@pytest.mark.parametrize("width", [2880, 5120])
def test_a_row_s_logits_have_the_same_bits_in_any_company(lab: Lab, width: int) -> None:
    options = router_inputs(64, width, 128)
    options["row_live"] = torch.ones(64, dtype=torch.uint8)
    together = route(lab, options)
    for part in ([0], [63], [7, 5], [3, 2, 1, 0], list(range(20, 31))):
        own = {**options, "x": options["x"][part], "row_live": options["row_live"][part]}
        alone = route(lab, own)
        assert same_bits(alone["normed"], together["normed"][part])
        assert torch.equal(alone["logits"], together["logits"][part])


@pytest.mark.parametrize("chunks", [1, 360, 2880])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_what_is_awaited_is_all_ones(lab: Lab, rows: int, chunks: int) -> None:
    check_router_fills(lab, rows, 2880, 128, chunks)
