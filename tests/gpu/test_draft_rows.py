"""The rows around the draft model on a GPU."""

import pytest
from kernel_cases import Bench
from row_cases import (
    check_block,
    check_boundary,
    check_features,
    check_last,
    check_level,
    check_markov,
    check_prefill_rows,
    check_token_rows,
)


@pytest.mark.parametrize("width", [8, 2880, 16384])
def test_against_the_reference(bench: Bench, width: int) -> None:
    for seed in range(3):
        check_features(bench, seed, width=width, num_sources=3)
        check_last(bench, seed, widths=(2 * width, width))
        check_boundary(bench, seed, width=width)
        check_level(bench, seed, width=width)
        check_block(bench, seed, width=width, accepted=1 + 3 * seed, drafting=2 + seed)
        check_markov(bench, seed, vocabulary=(97, 128, 32000)[seed])
        check_token_rows(bench, seed, columns=(1, 8, 64)[seed])
        check_prefill_rows(bench, seed, width=width, start=4 * seed, live=14 - 3 * seed)


@pytest.mark.parametrize("count", [1, 5])
def test_any_number_of_sources(bench: Bench, count: int) -> None:
    check_features(bench, 7, width=64, num_sources=count)
    check_last(bench, 7, widths=(64,))
