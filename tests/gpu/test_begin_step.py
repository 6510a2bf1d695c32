"""The start of a step on a card."""

import pytest
import torch
from begin_step_cases import check_begin_step
from kernel_cases import Bench

from lowlat.executors.launcher import Launcher

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(12))
def test_against_the_reference(seed: int) -> None:
    device = torch.device("cuda", 0)
    bench = Bench(device, Launcher(device).run)
    batch = (1, 2, 4, 8)[seed % 4]
    context = (30, 3000)[seed % 2]
    check_begin_step(bench, seed, batch=batch, max_batch=8, num_commands=seed % 6, context=context)
