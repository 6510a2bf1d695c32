"""The start of a step in the simulator."""

import pytest
import torch
from begin_step_cases import check_begin_step
from kernel_cases import Bench, simulate

from lowlat.kernels.step import begin_step

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.mark.parametrize("seed", range(24))
def test_against_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sizes = 1 + seed % 3, {"num_commands": seed % 5, "context": 30}
    monkeypatch.setattr(begin_step, "THREADS", 96)
    how = ("fused", "alone", "given")[seed % 4 % 3]
    check_begin_step(BENCH, seed * 7, batch=batch, max_batch=batch + seed % 2, **sizes, how=how)
