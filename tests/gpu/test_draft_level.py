"""The levels of a draft on a card."""

import pytest
import torch
from kernel_cases import Bench
from row_cases import check_level

from lowlat.executors.launcher import Launcher

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = torch.device("cuda", 0)
    return Bench(device, Launcher(device).run)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("width", [16, 4096])
def test_against_the_reference(bench: Bench, width: int, together: bool) -> None:
    for seed in range(4):
        check_level(bench, seed, width=width, together=together)
