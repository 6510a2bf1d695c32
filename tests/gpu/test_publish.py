"""The end of a step on a card."""

import pytest
import torch
from kernel_cases import Bench
from publish_cases import check_publish

from lowlat.executors.launcher import Launcher

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = torch.device("cuda", 0)
    return Bench(device, Launcher(device).run)


@pytest.mark.parametrize("drafting", ["no", "fused", "alone"])
@pytest.mark.parametrize("group", [1, 4])
def test_against_the_reference(bench: Bench, group: int, drafting: str) -> None:
    for seed in range(10 * group, 10 * group + 10):
        check_publish(bench, seed, drafting=drafting, batch=4)
