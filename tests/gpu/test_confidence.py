"""Drafting that ends by confidence, on a GPU: kinds of rows of logits, and steps in a row against the references."""

import pytest
import torch
from confidence_cases import ENDS, check_depths, check_nobody, sure_arrays, sure_calls
from kernel_cases import Bench
from selection_cases import Memory

from lowlat.executors.launcher import Launcher
from lowlat.kernels.speculation.draft_confidence import draft_confidence


@pytest.mark.parametrize("width", [97, 4096, 8203, 32000, 128256, 151936, 201088, 262144])
def test_kinds_are_the_reference_s(width: int, launcher: Launcher) -> None:
    """Again and again on the same counters, in launches that follow each other at once."""
    arrays, expected = sure_arrays(width, width)
    placed = {name: tensor.cuda() for name, tensor in arrays.items()}
    memory = Memory("cuda")
    for _ in range(3):
        placed["kinds"].fill_(-77)
        launcher.run(*(call for calls in sure_calls(draft_confidence, placed, memory) for call in calls))
        assert torch.equal(placed["kinds"].cpu(), expected)
        assert memory.at_rest()


@pytest.mark.parametrize("seed", range(4))
def test_depths_are_the_reference_s(seed: int, bench: Bench) -> None:
    reached = check_depths(bench, seed, 200)
    assert reached > {f"{what} at {end}" for what in ("on", "stop") for end in range(len(ENDS))}


def test_a_step_for_nobody(bench: Bench) -> None:
    check_nobody(bench)
