"""Dynamic trees: the operations against EAGLE-2 in plain words, the kernels walked against the operations, refusals."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from dynamic_cases import best_paths, check_growth, check_scores, grown, logits_after, paths_of
from kernel_cases import Bench
from kernel_walk import Walker, walkable

from lowlat.errors import ShapeError
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.speculation.grow import first_entry
from lowlat.kernels.speculation import draft_scores, grow, hand_over
from lowlat.kernels.toolchain.kernel import KernelCall


def lines(*parts: Any) -> list[list[int]]:
    return [part[0].tolist() for part in parts]


@pytest.mark.parametrize(("top_k", "depth", "count"), [(2, 2, 3), (3, 4, 9), (4, 5, 31), (8, 3, 20), (5, 7, 15)])
def test_the_operations_choose_what_eagle_2_chooses(top_k: int, depth: int, count: int) -> None:
    for seed in range(4):
        logits = partial(logits_after, vocabulary=40, seed=seed)
        found = grown(logits, top_k, depth, count)
        expected = best_paths(logits, top_k, depth, count)
        assert paths_of(*lines(found["draft_nodes"], found["draft_parents"])) == list(expected)
        assert list(expected.values()) == sorted(expected.values(), reverse=True)


@pytest.mark.parametrize(("top_k", "depth", "count"), [(2, 3, 6), (4, 5, 31), (8, 2, 15)])
def test_a_block_s_tree_is_that_of_a_model_that_knows_depths_alone(top_k: int, depth: int, count: int) -> None:
    lists = [logits_after((level,), 40, 0) for level in range(depth)]
    expected = best_paths(lambda path: lists[len(path)], top_k, depth, count)
    ranked = {"top_tokens": torch.zeros(depth, top_k).int(), "top_logprobs": torch.zeros(depth, top_k)}
    OPERATIONS["draft_topk_logprobs"](torch.stack(lists), torch.arange(40, dtype=torch.int32), **ranked, k=top_k)
    nodes = {name: torch.zeros(1, count + 1).int() for name in ("draft_nodes", "draft_parents")}
    OPERATIONS["grow_block_tree"](**ranked, **nodes, first_row=0)
    assert paths_of(*lines(nodes["draft_nodes"], nodes["draft_parents"])) == list(expected)


def test_the_kernels_walked() -> None:
    for seed in range(6):
        with walkable(walker := Walker(), "common.memory", "speculation.grow", "speculation.hand_over") as modules:
            _, grower, handing = modules
            grower.__dict__["THREADS"] = 32
            make = {name: getattr(grower, name) for name in ("grow_tree", "choose_nodes", "grow_block_tree")}
            check_growth(walked(walker), seed, {**make, "hand_over_tree": handing.hand_over_tree})


@pytest.mark.parametrize(("width", "k"), [(4104, 3)])
def test_the_likeliest_drafts_walked(width: int, k: int) -> None:
    with walkable(walker := Walker(may_leave=True), "speculation.draft_scores") as modules:
        module: Any = modules[-1]
        check_scores(walked(walker), width, k, module.draft_topk_logprobs)


def walked(walker: Walker) -> Bench:
    def run(*calls: KernelCall) -> None:
        for call in calls:
            walker.run(call)

    return Bench(torch.device("cpu"), run)


def test_sizes_beyond_the_kernels_are_refused() -> None:
    nodes = {name: torch.zeros(1, 4).int() for name in ("draft_nodes", "draft_parents")}
    lists = {"top_tokens": torch.zeros(7, 16).int(), "top_logprobs": torch.zeros(7, 16)}
    assert first_entry(8, 16) > 1088
    calls: Sequence[tuple[Any, dict[str, Any], str]] = (
        (grow.grow_block_tree, {**lists, **nodes, "first_row": 0}, "7 rows of 16 drafts"),
        (grow.grow_block_tree, {**lists, **nodes, "first_row": 7}, "from row 7 on make no tree"),
        (
            draft_scores.draft_topk_logprobs,
            {"logits": torch.zeros(1, 99), "draft_to_target": torch.zeros(99).int(), "k": 33, "workspace": None}
            | {"top_tokens": torch.zeros(1, 33).int(), "top_logprobs": torch.zeros(1, 33)},
            "k must be from 1 to 32, got 33",
        ),
        (
            hand_over.hand_over_tree,
            {name: torch.zeros(1, 65).int() for name in ("draft_nodes", "draft_parents", "drafts")}
            | {"tree_masks": torch.zeros(1, 65).long(), "draft_live": torch.zeros(1).byte()}
            | {name: torch.zeros(1).int() for name in ("slots", "num_drafts")}
            | {"tree_paths": torch.zeros(1, 9, 4).int()},
            "a tree of 65 nodes",
        ),
    )
    for build, given, match in calls:
        with pytest.raises(ShapeError, match=match):
            build(**given)
