"""N-gram drafts on a GPU."""

import pytest
from kernel_cases import Bench
from ngram_cases import check_ngram_draft


@pytest.mark.parametrize("matches", [(1, 1), (2, 4), (1, 16)])
@pytest.mark.parametrize("context", [1001, 8192])
def test_against_the_reference(bench: Bench, context: int, matches: tuple[int, int]) -> None:
    for seed in range(20):
        lengths = [1, 2, 3, 100 + seed, context - seed, context]
        check_ngram_draft(bench, seed, context=context, lengths=lengths, matches=matches)


def test_a_long_text_is_searched_to_its_beginning(bench: Bench) -> None:
    check_ngram_draft(bench, 1, context=131072, lengths=[131072, 131071], matches=(2, 4))
