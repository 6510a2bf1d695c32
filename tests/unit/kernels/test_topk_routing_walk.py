"""The routing of experts in a launch of its own, walked thread by thread on a CPU."""

import pytest
import torch
from kernel_walk import Walker, walkable
from moe_cases import exact_shares, make_logits, want_routing

from lowlat.errors import ShapeError
from lowlat.kernels.moe.topk_routing import TopKRouting, route_top_k

NAMES = ("moe.topk_routing",)


def chosen(routing: TopKRouting, top_k: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rows, walker = len(routing.logits), Walker()
    ids = torch.full((rows, top_k), 77, dtype=torch.int32)
    shares = torch.full((rows, top_k), torch.nan)
    with walkable(walker, *NAMES) as modules:
        for call in modules[-1].route_top_k(routing=routing, expert_ids=ids, expert_weights=shares, scale=scale):
            walker.run(call)
    return ids, shares


@pytest.mark.parametrize(
    ("kind", "rows", "top_k", "count", "flagged"),
    [
        ("random", 1, 4, 37, False),
        ("odd", 9, 8, 70, True),
        ("shared", 8, 4, 32, False),
        ("ties", 11, 3, 33, True),
        ("none", 6, 3, 4, True),
        ("random", 5, 1, 1, False),
    ],
)
def test_rows_choose_as_the_reference_does(kind: str, rows: int, top_k: int, count: int, flagged: bool) -> None:
    """Blocks that are full and that are not; no row for a warp, some or all dead."""
    logits = make_logits("random" if kind == "none" else kind, rows, count)
    live = ((torch.arange(rows) % 3 != 1) & (kind != "none")).to(torch.uint8) if flagged else None
    routing = TopKRouting(logits, live)
    ids, shares = chosen(routing, top_k)
    wanted, about = want_routing(routing, top_k)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(shares, exact_shares(logits, wanted), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(shares, about, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_shares_are_scaled_by_expert_last() -> None:
    routing, scale = (
        TopKRouting(make_logits("random", 6, 20), (torch.arange(6) % 3 != 1).to(torch.uint8)),
        torch.rand(20),
    )
    (ids, shares), (same, scaled) = chosen(routing, 3), chosen(routing, 3, scale)
    assert torch.equal(ids, same)
    assert torch.equal(scaled, torch.where(ids >= 0, shares * scale[ids.clamp(min=0).long()], 0))
    with pytest.raises(ShapeError, match="scale must have shape"):
        route_top_k(routing=routing, expert_ids=ids, expert_weights=shares, scale=scale[1:])


@pytest.mark.parametrize(
    ("kind", "rows", "top_k", "count", "over_all"),
    [
        ("random", 2, 9, 257, False),
        ("odd", 5, 11, 513, False),
        ("ties", 1, 11, 400, True),
        ("none", 2, 3, 4, False),
        ("random", 1, 2, 2, True),
    ],
)
def test_a_shared_expert_is_the_last_of_every_row(kind: str, rows: int, top_k: int, count: int, over_all: bool) -> None:
    """Its logit weighs nobody else's share, not even one that is not a number."""
    logits = make_logits("random" if kind == "none" else kind, rows, count)
    live = torch.zeros(rows, dtype=torch.uint8) if kind == "none" else None
    routing = TopKRouting(logits, live, over_all, shared=True)
    ids, shares = chosen(routing, top_k)
    wanted, about = want_routing(routing, top_k)
    assert torch.equal(ids, wanted) and bool((ids[:, -1] == (-1 if kind == "none" else count - 1)).all())
    if not over_all:
        exact = exact_shares(logits, wanted, shared=True)
        torch.testing.assert_close(shares, exact, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(shares, about, rtol=1e-5, atol=1e-7, equal_nan=True)
    alone, weights = chosen(TopKRouting(logits[:, :-1].contiguous(), live, over_all), top_k - 1)
    assert torch.equal(alone, ids[:, :-1])
    torch.testing.assert_close(weights, shares[:, :-1], rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    routing = TopKRouting(torch.zeros(3, 9))
    ids, shares = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4)
    with pytest.raises(ShapeError, match="at most 10 experts of at most 512, got 10 of 9"):
        route_top_k(routing=routing, expert_ids=torch.zeros(3, 10, dtype=torch.int32), expert_weights=shares)
    shared = TopKRouting(torch.zeros(3, 514), shared=True)
    with pytest.raises(ShapeError, match="10 experts of at most 512 next to a shared one, got 3 of 513"):
        route_top_k(routing=shared, expert_ids=ids, expert_weights=shares)
