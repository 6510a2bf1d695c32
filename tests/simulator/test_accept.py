"""Acceptance and commit in the simulator."""

import pytest
import torch
from accept_cases import check_accept
from kernel_cases import Bench, simulate

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("probability", [None, 0.0, 0.607, 1.0])
def test_against_the_reference(probability: float | None, alone: bool) -> None:
    for seed in range(0, 130 if probability is None else 50, 13):
        check_accept(BENCH, seed, batch=1 + seed % 4, alone=alone, head=seed % 3 > 0, probability=probability)


def test_the_cases_reach_every_end() -> None:
    reasons: set[int] = set()
    lengths: set[int] = set()
    for seed in range(100, 240, 11):
        given = check_accept(BENCH, seed, batch=3, alone=False, head=True, probability=None)
        reasons.update(given["finish"].tolist())
        lengths.update(given["accepted_lens"].tolist())
    assert reasons == {0, 1, 2, 3}
    assert lengths >= {0, 1, 2, 3, 4}
