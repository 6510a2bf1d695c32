"""Acceptance and commit on a card."""

import pytest
import torch
from accept_cases import check_accept
from kernel_cases import Bench

from lowlat.executors.launcher import Launcher

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("mean", [None, 2.6])
def test_against_the_reference(mean: float | None, parts: bool) -> None:
    device = torch.device("cuda", 0)
    bench = Bench(device, Launcher(device).run)
    for seed in range(10):
        check_accept(bench, seed, batch=1 + seed % 4, parts=parts, head=seed % 3 > 0, mean=mean)
