"""Acceptance and commit on a GPU."""

import pytest
from accept_cases import check_accept
from kernel_cases import Bench


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("probability", [None, 0.607])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_against_the_reference(bench: Bench, group: int, probability: float | None, alone: bool) -> None:
    for seed in range(10 * group, 10 * group + 10):
        check_accept(bench, seed, batch=4, alone=alone, head=group != 2, probability=probability)
