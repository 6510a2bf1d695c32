"""The choice of widths, and rows that wait for the draft model, in the simulator."""

import pytest
import torch
from draft_length_cases import MOST, check_lengths, check_waiting
from kernel_cases import Bench, simulate

BENCH = Bench(torch.device("cpu"), simulate)


def test_widths() -> None:
    chosen = check_lengths(BENCH, 0, 8) | check_lengths(BENCH, 1, 10)
    assert {0, MOST + 1} < chosen and len(chosen) > 3


@pytest.mark.parametrize("seed", (0, 1, 5, 6))
def test_waiting_rows(seed: int) -> None:
    check_waiting(BENCH, seed)
