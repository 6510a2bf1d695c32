"""Philox on a card."""

import pytest
import torch
from kernel_cases import Bench
from philox_cases import check_philox

from lowlat.executors.launcher import Launcher

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = torch.device("cuda", 0)
    return Bench(device, Launcher(device).run)


def test_against_the_reference(bench: Bench) -> None:
    check_philox(bench, 5)
