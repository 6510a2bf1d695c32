"""The choice of widths, and rows that wait for the draft model, in the simulator."""

import pytest
import torch
from kernel_cases import Bench, simulate
from width_cases import MOST, check_waiting, check_widths

from lowlat.kernels.step.choose_width import choose_width, join_widths

BENCH = Bench(torch.device("cpu"), simulate)


def test_widths() -> None:
    chosen = check_widths(BENCH, 0, 4, choose_width, join_widths) | check_widths(BENCH, 1, 8, choose_width, join_widths)
    assert {0, MOST + 1} < chosen and len(chosen) > 3


@pytest.mark.parametrize("seed", range(3))
def test_waiting_rows(seed: int) -> None:
    check_waiting(BENCH, seed)
