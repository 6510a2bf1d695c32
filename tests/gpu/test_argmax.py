"""The argmax kernel: values, ties, broken and dead rows, and a row's bits in any company."""

import pytest
import torch
from selection_cases import best_pairs

from lowlat.executors.launcher import Launcher
from lowlat.kernels.sampling.argmax import argmax
from lowlat.kernels.sampling.select import INFINITY

WIDTHS = (1, 5, 97, 4096, 4097, 32000, 128256, 201088, 262208)


def run(
    launcher: Launcher, logits: torch.Tensor, live: torch.Tensor | None = None, names: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.full((logits.shape[0],), -77, dtype=torch.int32, device="cuda")
    if names is None:
        names = torch.arange(logits.shape[1], dtype=torch.int32, device="cuda")
    launcher.run(*argmax(best_pairs(logits, INFINITY, 132), live, out=out, names=names))
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_the_lowest_of_the_largest(launcher: Launcher, width: int) -> None:
    logits = torch.randn(9, width, device="cuda")
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, width // 2] = -0.0
    logits[3] = -3e38
    logits[4] = -torch.inf
    logits[5, width - 1] = torch.inf
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in logits.cpu()]
    assert run(launcher, logits).tolist() == expected
    names = torch.randperm(width, device="cuda").int()
    assert run(launcher, logits, names=names).tolist() == names.cpu()[expected].tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_dead_and_broken_rows_give_none(launcher: Launcher, width: int) -> None:
    logits = torch.randn(6, width, device="cuda")
    logits[1, width - 1], logits[2, 0], logits[4] = torch.nan, torch.nan, torch.nan
    live = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.uint8, device="cuda").reshape(2, 3)
    found = run(launcher, logits, live).tolist()
    assert [found[row] for row in (1, 2, 4, 5)] == [-1] * 4
    assert [found[row] for row in (0, 3)] == logits.cpu().argmax(-1)[[0, 3]].tolist()


def test_many_rows(launcher: Launcher) -> None:
    logits = torch.randn(512, 3200, device="cuda")
    assert torch.equal(run(launcher, logits).long(), logits.argmax(-1))
