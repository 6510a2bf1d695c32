"""Compaction of the KV cache on a card."""

import pytest
import torch
from kernel_cases import Bench
from row_cases import check_compaction

from lowlat.executors.launcher import Launcher

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = torch.device("cuda", 0)
    return Bench(device, Launcher(device).run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_the_reference(bench: Bench, dtype: torch.dtype) -> None:
    for seed in range(10):
        check_compaction(bench, seed, layers=1 + seed % 3, dtype=dtype)
