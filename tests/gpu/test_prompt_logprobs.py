"""The rows of prompts on a card."""

import pytest
from kernel_cases import Bench
from prompt_logprob_cases import check_all


@pytest.mark.parametrize("width", [24, 4096])
def test_against_the_reference(bench: Bench, width: int) -> None:
    check_all(bench, width=width, vocabularies=(7, 300, 128256))
