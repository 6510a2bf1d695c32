"""The checks of a step in the simulator."""

import check_cases as cases
import pytest
import torch
from kernel_cases import Bench, simulate

from lowlat.kernels.reference.step import checks
from lowlat.kernels.step import check_rows_kernel, check_slots_kernel

BENCH = Bench(torch.device("cpu"), simulate)
WRONG: dict[cases.Check, dict[str, cases.Wrong]] = {
    cases.check_slots: cases.SLOTS_WRONG,
    cases.check_rows: cases.ROWS_WRONG,
    cases.check_accepted: cases.ACCEPTED_WRONG,
    cases.check_commit: cases.COMMIT_WRONG,
}


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (check_rows_kernel, check_slots_kernel):
        monkeypatch.setattr(module, "THREADS", 32)
    for made in ("slots_kernel", "commit_kernel"):
        getattr(check_slots_kernel, made).cache_clear()
    for made in ("rows_kernel", "accepted_kernel"):
        getattr(check_rows_kernel, made).cache_clear()


@pytest.mark.parametrize("check", WRONG, ids=lambda check: check.__name__)
def test_against_the_reference(check: cases.Check) -> None:
    for number, wrong in enumerate(WRONG[check]):
        for seed in range(7 * number, 7 * number + 60, 17):
            failed = check(BENCH, seed, wrong, batch=2 + seed % 2)
            assert not failed or wrong != "nothing"


def test_kinds_that_were_not_asked_for_are_not_checked() -> None:
    for seed in range(3):
        assert not cases.check_slots(BENCH, seed, "length", checks_lengths=False)
        assert not cases.check_slots(BENCH, seed, "null block", checks_spans=False)
        assert not cases.check_rows(BENCH, seed, "mask", checks_masks=False, checks_spans=False)
        assert not cases.check_commit(BENCH, seed, "length", checks_lengths=False)
        assert cases.check_slots(BENCH, seed, "length", joins=True) <= {checks.LENGTH_BOUNDS, checks.LENGTH_CHANGED}
