"""DFlash2's convolution and its walk through candidates on a GPU."""

import pytest
from kernel_cases import Bench
from row_cases import check_features
from rowwise_cases import Lab, check_local_conv, check_walk


@pytest.mark.parametrize(("rows", "width", "group", "taps"), [(8, 5120, 16, 2), (16, 2048, 8, 3), (2, 72, 8, 1)])
def test_a_convolution_has_the_bits_of_the_reference(lab: Lab, rows: int, width: int, group: int, taps: int) -> None:
    check_local_conv(lab, rows, width, group, taps)


@pytest.mark.parametrize(("rows", "ranks", "rank"), [(8, 16, 256), (16, 32, 512), (4, 5, 8)])
def test_a_walk_drafts_the_chain_of_the_reference(lab: Lab, rows: int, ranks: int, rank: int) -> None:
    for first_row in (0, 1):
        check_walk(lab, rows, ranks, rank, first_row)


def test_more_sources_than_five(bench: Bench) -> None:
    for count in (6, 8):
        check_features(bench, count, width=2816, num_sources=count)
