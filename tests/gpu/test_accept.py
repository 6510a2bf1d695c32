"""Acceptance and commit on a card."""

import pytest
import torch
from accept_cases import check_accept
from kernel_cases import Bench

from lowlat.executors.launcher import Launcher

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = torch.device("cuda", 0)
    return Bench(device, Launcher(device).run)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("mean", [None, 2.6])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_against_the_reference(bench: Bench, group: int, mean: float | None, alone: bool) -> None:
    for seed in range(10 * group, 10 * group + 10):
        check_accept(bench, seed, batch=4, alone=alone, head=group != 2, mean=mean)
