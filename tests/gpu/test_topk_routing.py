"""The routing of experts in a launch of its own, on a GPU: the reference's, and a row's bits in any company."""

import pytest
import torch
from moe_cases import make_logits, want_routing

from lowlat.executors.launcher import Launcher
from lowlat.kernels.moe.topk_routing import TopKRouting, route_top_k

DEVICE = torch.device("cuda", 0)


def chosen(launcher: Launcher, routing: TopKRouting, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(routing.logits)
    ids = torch.full((rows, top_k), 77, dtype=torch.int32, device=DEVICE)
    shares = torch.full((rows, top_k), torch.nan, device=DEVICE)
    launcher.run(*route_top_k(routing=routing, expert_ids=ids, expert_weights=shares))
    return ids, shares


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize(
    ("rows", "top_k", "count"), [(1, 4, 128), (64, 4, 128), (515, 4, 128), (37, 8, 256), (5, 1, 1)]
)
@pytest.mark.parametrize("kind", ["random", "odd", "shared", "ties"])
def test_rows_choose_as_the_reference_does(
    kind: str, rows: int, top_k: int, count: int, flagged: bool, launcher: Launcher
) -> None:
    logits = make_logits(kind, rows, count)
    live = (torch.arange(rows) % 3 != 1).to(torch.uint8) if flagged else None
    wanted, about = want_routing(TopKRouting(logits, live), top_k)
    routing = TopKRouting(logits.to(DEVICE), None if live is None else live.to(DEVICE))
    ids, shares = chosen(launcher, routing, top_k)
    assert torch.equal(ids.cpu(), wanted)
    torch.testing.assert_close(shares.cpu(), about, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_a_row_s_choice_has_the_same_bits_in_any_company(launcher: Launcher) -> None:
    logits = make_logits("random", 130, 128).to(DEVICE)
    together = chosen(launcher, TopKRouting(logits), 4)
    for part in ([0], [129], [7, 5], list(range(60, 99))):
        alone = chosen(launcher, TopKRouting(logits[part].contiguous()), 4)
        for own, every in zip(alone, together, strict=True):
            assert torch.equal(own, every[part])
