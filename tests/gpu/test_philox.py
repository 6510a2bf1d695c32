"""Philox on a GPU."""

from kernel_cases import Bench
from philox_cases import check_philox


def test_against_the_reference(bench: Bench) -> None:
    check_philox(bench, 5)
