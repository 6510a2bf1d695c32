"""The head's likeliest ids: order, ties, dead and broken rows."""

import pytest
import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.speculation.draft_topk import draft_topk


def top(logits: torch.Tensor, k: int, mapping: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((logits.shape[0], k), 12345, dtype=torch.int32, device=logits.device)
    draft_topk(logits, mapping.to(logits.device), live, out=out, k=k)
    return out.cpu()


@pytest.mark.parametrize("width", [1, 5, 63, 64, 1001])
def test_ranks_follow_value_then_id(width: int, device: str) -> None:
    mapping = torch.randperm(width).int() * 3
    logits = torch.randint(-3, 4, (13, width)).float()  # many ties
    for k in {1, min(4, width), width}:
        got = top(logits.to(device), k, mapping)
        for row, ids in zip(logits.tolist(), got.tolist(), strict=True):
            order = sorted(range(width), key=lambda token: (-row[token], token))[:k]
            assert ids == [int(mapping[token]) for token in order]


def test_dead_and_broken_rows_draft_nothing_and_disturb_nobody(device: str) -> None:
    mapping, logits = torch.arange(50, dtype=torch.int32), torch.randn(6, 50, device=device)
    expected = top(logits, 3, mapping)
    logits[1] = float("nan")
    logits[2, 49] = float("nan")
    logits[4, 7] = -float("inf")
    live = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.uint8, device=device)
    got = top(logits, 3, mapping, live.reshape(3, 2))
    assert bool((got[[1, 2, 5]] == -1).all())
    assert torch.equal(got[[0, 3]], expected[[0, 3]])
    assert 7 not in got[4].tolist()


def test_extremes_and_errors() -> None:
    mapping = torch.arange(4, dtype=torch.int32)
    logits = torch.tensor([[1e30, -1e30, 3e38, 0.0], [-0.0, 0.0, -1.0, -0.0]])
    assert top(logits, 4, mapping).tolist() == [[2, 0, 3, 1], [0, 1, 3, 2]]
    with pytest.raises(ShapeError, match="k must be"):
        top(logits, 5, mapping)
    with pytest.raises(ShapeError, match="draft_to_target"):
        top(logits, 1, mapping[:3])
    with pytest.raises(ShapeError, match="row_live"):
        top(logits, 1, mapping, torch.ones(3, dtype=torch.uint8))
