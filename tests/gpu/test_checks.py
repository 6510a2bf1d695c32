"""The checks of a step on a GPU."""

import check_cases as cases
import pytest
from kernel_cases import Bench

CASES = [
    *((cases.check_slots, wrong) for wrong in cases.SLOTS_WRONG),
    *((cases.check_rows, wrong) for wrong in cases.ROWS_WRONG),
    *((cases.check_accepted, wrong) for wrong in cases.ACCEPTED_WRONG),
    *((cases.check_commit, wrong) for wrong in cases.COMMIT_WRONG),
]


@pytest.mark.parametrize(("check", "wrong"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_against_the_reference(check: cases.Check, wrong: str, bench: Bench) -> None:
    for seed in range(30, 40):
        check(bench, seed, wrong, batch=4)
