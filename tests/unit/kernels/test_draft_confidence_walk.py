"""The kernel of a draft's confidence, walked thread by thread on a CPU: the reference's kinds, and counters at rest."""

from typing import Any

import pytest
import torch
from confidence_cases import sure_arrays, sure_calls
from kernel_walk import Walker, walkable
from selection_cases import Memory
from stages import staged

from lowlat.errors import ShapeError
from lowlat.kernels.reference.speculation import draft_confidence as reference
from lowlat.kernels.speculation.draft_confidence import draft_confidence

NAMES = ("common.memory", "common.norm_math", "sampling.select", "trees.draft_confidence")


@pytest.mark.parametrize("width", staged([97, 4104, 8191], [97]))
def test_kinds_of_the_reference(width: int) -> None:
    """Rows of one chunk and of several, whose loads are wide and narrow; the second time on the same counters."""
    arrays, expected = sure_arrays(width, width)
    memory = Memory("cpu")
    with walkable(walker := Walker(), *NAMES) as modules:
        kernels: Any = modules[-1]
        for _ in range(2):
            arrays["kinds"].fill_(-77)
            for calls in sure_calls(kernels.draft_confidence, arrays, memory):
                assert len(calls) == 1
                walker.run(*calls)
            assert torch.equal(arrays["kinds"], expected)
            assert memory.at_rest()


@pytest.mark.second
def test_a_lane_puts_two_chunks_together() -> None:
    logits, memory = torch.randn(2, 32 * 4096 + 12, generator=torch.Generator().manual_seed(2)), Memory("cpu")
    kinds = torch.full((2, 1), -77, dtype=torch.int32)
    for row, place in enumerate((7, 32 * 4096 + 7)):
        logits[row, place] = float(logits[row].double().exp().sum().log()) + 0.4  # 0.6 of the row
    expected = kinds.clone()
    reference.draft_confidence(logits, draft_kinds=expected, end=0)
    with walkable(walker := Walker(), *NAMES) as modules:
        kernels: Any = modules[-1]
        walker.run(*kernels.draft_confidence(logits, draft_kinds=kinds, end=0, workspace=memory))
    assert expected.tolist() == [[2], [2]] and torch.equal(kinds, expected) and memory.at_rest()


def test_shapes_that_do_not_fit_are_refused() -> None:
    kinds, memory = torch.zeros(2, 3, dtype=torch.int32), Memory("cpu")
    with pytest.raises(ShapeError, match="end must be"):
        draft_confidence(torch.zeros(2, 8), draft_kinds=kinds, end=3, workspace=memory)
    with pytest.raises(ShapeError, match="row_live"):
        draft_confidence(torch.zeros(2, 8), torch.ones(3), draft_kinds=kinds, end=0, workspace=memory)
    with pytest.raises(ShapeError, match="draft_kinds"):
        draft_confidence(torch.zeros(3, 8), draft_kinds=kinds, end=0, workspace=memory)
    with pytest.raises(ShapeError, match="262144"):
        draft_confidence(torch.zeros(2, 262145), draft_kinds=kinds, end=0, workspace=memory)
