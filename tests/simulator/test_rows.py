"""Compaction, KV writes and the rows around the draft model in the simulator."""

import pytest
import torch
from kernel_cases import Bench, simulate
from row_cases import (
    check_block,
    check_boundary,
    check_compaction,
    check_features,
    check_last,
    check_level,
    check_markov,
    check_prefill_rows,
    check_token_rows,
    check_write,
)

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.mark.parametrize("seed", range(3))
def test_compaction(seed: int) -> None:
    check_compaction(BENCH, seed, layers=1)


def test_features_last_rows_and_boundaries() -> None:
    check_features(BENCH, 1, width=24, num_sources=3)
    check_features(BENCH, 2, width=8, num_sources=5)
    check_features(BENCH, 3, width=8, num_sources=7)
    check_last(BENCH, 3, widths=(16, 8))
    check_last(BENCH, 4, widths=(8,))
    check_boundary(BENCH, 5, width=16)


@pytest.mark.parametrize(("start", "live"), [(0, 14), (8, 0), (5, 8)])
def test_prefill_rows(start: int, live: int) -> None:
    check_prefill_rows(BENCH, 6, width=16, start=start, live=live)


@pytest.mark.parametrize("seed", range(2))
def test_levels_and_writes(seed: int) -> None:
    check_level(BENCH, seed, width=24)
    check_block(BENCH, seed, width=24, accepted=1 + seed, drafting=2 + seed)
    check_markov(BENCH, seed, vocabulary=(13, 24)[seed % 2])
    check_token_rows(BENCH, seed, columns=(1, 5)[seed % 2])
    check_write(BENCH, seed, heads=1 + seed, dim=8 + 8 * seed)
