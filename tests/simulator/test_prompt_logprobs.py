"""The rows of prompts in the simulator."""

import torch
from kernel_cases import Bench, simulate
from prompt_logprob_cases import check_all


def test_against_the_reference() -> None:
    check_all(Bench(torch.device("cpu"), simulate), width=24, vocabularies=(7, 300))
