"""Compaction and the rows around the head in the simulator."""

import pytest
import torch
from kernel_cases import Bench, simulate
from row_cases import check_boundary, check_compaction, check_features, check_last

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.mark.parametrize("seed", range(6))
def test_compaction(seed: int) -> None:
    check_compaction(BENCH, seed, layers=1)


def test_features_last_rows_and_boundaries() -> None:
    check_features(BENCH, 1, width=24, num_sources=3)
    check_features(BENCH, 2, width=8, num_sources=5)
    check_last(BENCH, 3, widths=(16, 8))
    check_last(BENCH, 4, widths=(8,))
    check_boundary(BENCH, 5, width=16)
