"""Embedding rows on a GPU, from both layouts, and with their norm."""

import pytest
from rowwise_cases import Lab, check_embeddings


@pytest.mark.parametrize(("rows", "width"), [(2, 8), (4, 72), (7, 2880), (64, 4096), (3, 4104), (4, 8192), (2, 20000)])
def test_against_the_reference(lab: Lab, rows: int, width: int) -> None:
    check_embeddings(lab, rows, width, 1003)


@pytest.mark.parametrize("width", [72, 2560, 5376])
def test_rows_times_a_scale(lab: Lab, width: int) -> None:
    check_embeddings(lab, 4, width, 1003, scale=width**0.5)
