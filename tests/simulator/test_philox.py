"""Philox in the simulator, and on the CPU what it must be."""

import torch
from kernel_cases import Bench, simulate
from philox_cases import check_philox


def test_against_the_reference() -> None:
    check_philox(Bench(torch.device("cpu"), simulate), 5)
