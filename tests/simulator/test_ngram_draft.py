"""N-gram drafts in the simulator."""

import pytest
import torch
from kernel_cases import Bench, simulate
from ngram_cases import check_ngram_draft

from lowlat.kernels.speculation import ngram_draft as kernels

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that short texts take several turns."""
    monkeypatch.setattr(kernels, "THREADS", 32)
    kernels._make.cache_clear()


@pytest.mark.parametrize("matches", [(1, 1), (2, 4), (3, 3), (1, 16)])
def test_against_the_reference(matches: tuple[int, int]) -> None:
    drafting = 0
    for seed, lengths in enumerate(([1, 2, 3], [5, 17, 40], [255, 256, 257], [600])):
        drafting += check_ngram_draft(BENCH, seed, context=601, lengths=lengths, matches=matches)
    assert 3 <= drafting <= 10
