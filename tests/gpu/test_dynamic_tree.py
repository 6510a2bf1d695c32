"""The kernels of dynamic trees on a GPU against their references: growth, choice, masks and paths exactly."""

import pytest
import torch
from dynamic_cases import check_growth, check_scores
from kernel_cases import Bench

from lowlat.executors.launcher import Launcher
from lowlat.kernels.speculation import draft_scores, grow, hand_over

pytestmark = pytest.mark.gpu
KERNELS = {
    **{build.__name__: build for build in (grow.grow_tree, grow.choose_nodes, grow.grow_block_tree)},
    "hand_over_tree": hand_over.hand_over_tree,
}


@pytest.fixture
def bench() -> Bench:
    """The GPU."""
    device = torch.device("cuda", 0)
    return Bench(device, Launcher(device).run)


def test_growth_against_the_reference(bench: Bench) -> None:
    for seed in range(30):
        check_growth(bench, seed, KERNELS)


@pytest.mark.parametrize("k", [2, 8, 32])
@pytest.mark.parametrize("width", [97, 4096, 32000, 201088, 262208])
def test_the_likeliest_drafts_against_the_reference(width: int, k: int, bench: Bench) -> None:
    check_scores(bench, width, k, draft_scores.draft_topk_logprobs)
