"""The kernels that choose tokens, walked thread by thread on a CPU: the reference's tokens, and memory left at rest."""

from typing import Any

import pytest
import torch
from kernel_walk import Walker, walkable
from sampling_cases import World
from selection_cases import Memory, best_pairs, make_world

from lowlat.kernels.gemm.packing import pack
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.sampling import sample as reference
from lowlat.kernels.sampling.select import FINITE, INFINITY

SHARED = ("sampling.select", "common.philox", "common.sentinels", "common.host_word")
NAMES = (*SHARED, *(f"sampling.{part}" for part in ("cutoff", "grammar_mask", "logit_history", "row_pairs", "sample")))
OPTIONS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition": 1.3, "presence": 0.7, "frequency": 0.4},
    {"temperature": 0.0, "min_tokens": 9},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.6, "seed": 3, "repetition": 0.8, "min_tokens": 9},
    {"temperature": 1.7, "seed": (1 << 63) - 1, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.0, "has_grammar": 1},
    {"temperature": 0.6, "seed": 4, "repetition": 0.8, "top_k": 20, "has_grammar": 1},
]


def draw(
    world: World, logits: torch.Tensor, slots: list[int], live: torch.Tensor, memory: Memory, *, alone: bool = False
) -> dict[str, Any]:
    """Return the kernels' results for rows of one node: from a GEMM's pairs, or from `finite` and `sample` alone."""
    shape = (len(slots), 1)
    out = {"target_tokens": torch.full(shape, -77, dtype=torch.int32), "finite": torch.full(shape, 9).byte()}
    rows = torch.zeros(shape, dtype=torch.int32), torch.ones(shape, dtype=torch.int64)
    arguments = (logits, live, *rows, torch.tensor(slots, dtype=torch.int32), *world.state().values())
    with walkable(walker := Walker(may_leave=True), *NAMES) as modules:
        kernels: Any = modules[-1]
        if alone:
            calls = modules[-2].finite(logits, live, finite=out["finite"], workspace=memory)
            calls += kernels.sample(*arguments, target_tokens=out["target_tokens"], workspace=memory)
        else:
            calls = kernels.sample(*arguments, best=best_pairs(logits, FINITE), workspace=memory, **out)
        walker.run(*calls)
    return out


def expected(world: World, logits: torch.Tensor, slots: list[int], live: torch.Tensor) -> dict[str, Any]:
    shape = (len(slots), 1)
    out = {"target_tokens": torch.full(shape, -77, dtype=torch.int32), "finite": torch.full(shape, 9).byte()}
    rows = torch.zeros(shape, dtype=torch.int32), torch.ones(shape, dtype=torch.int64)
    arguments = (logits, live, *rows, torch.tensor(slots, dtype=torch.int32), *world.state().values())
    reference.sample(*arguments, target_tokens=out["target_tokens"])
    reference.finite(logits, live, finite=out["finite"])
    return out


@pytest.mark.wide
@pytest.mark.parametrize(("vocabulary", "ways"), [(97, (False,)), (4104, (True,))])
def test_tokens_of_the_reference(vocabulary: int, ways: tuple[bool, ...]) -> None:
    """Plain rows, and rows whose wishes touch one chunk of two, or both; drawn ones; a pad and a dead row."""
    world, slots = make_world(vocabulary, OPTIONS, [4]), [*range(len(OPTIONS)), -1, 3]
    logits, live = torch.randn(len(slots), vocabulary) * 3, torch.ones(len(slots), 1, dtype=torch.uint8)
    live[-2:] = 0
    want, memory = expected(world, logits, slots, live), Memory("cpu")
    for alone in ways:  # counters as they were
        got = draw(world, logits, slots, live, memory, alone=alone)
        assert torch.equal(got["finite"], want["finite"])
        assert torch.equal(got["target_tokens"], want["target_tokens"])
        assert memory.at_rest()


@pytest.mark.wide
def test_rows_that_are_not_finite_and_rows_without_a_choice_leave_memory_at_rest() -> None:
    """Greedy and drawn, plain and with wishes; and a row in which every token is banned."""
    world, slots, memory = make_world(4104, OPTIONS, [4]), [0, 1, 3, 4], Memory("cpu")
    live = torch.ones(4, 1, dtype=torch.uint8)
    for broken in (torch.nan, torch.inf, -torch.inf):
        logits = torch.randn(4, 4104)
        logits[:, 4100] = broken
        got = draw(world, logits, slots, live, memory, alone=broken != torch.inf)
        assert not got["finite"].any() and not got["target_tokens"].any() and memory.at_rest()
    forbidden = make_world(4104, OPTIONS[-2:], [])
    forbidden.grammar_masks.zero_()
    got = draw(forbidden, torch.randn(2, 4104), [0, 1], live[:2], memory := Memory("cpu"))
    assert got["target_tokens"].tolist() == [[-1], [-1]] and got["finite"].all() and memory.at_rest()
    banned = World(2, 1)
    banned.set(0, min_tokens=100, temperature=1.0)
    banned.stop_ids[0, :2] = torch.tensor([0, 1])
    memory = Memory("cpu")
    got = draw(banned, torch.zeros(1, 2), [0], live[:1], memory)
    assert got["target_tokens"].tolist() == [[0]] and memory.at_rest()


@pytest.mark.parametrize("alone", [False, True])
def test_a_chain_s_drafts_are_the_likeliest(alone: bool) -> None:
    logits = torch.randn(6, 100).round()
    logits[1, 99], logits[3] = torch.nan, -torch.inf
    live = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.uint8)
    names, out = torch.randperm(100, dtype=torch.int32), torch.full((6,), -77, dtype=torch.int32)
    children, child_rows = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    nodes = torch.full((2, 4), -77, dtype=torch.int32)
    names_of = ("common.memory", "sampling.select", "sampling.row_pairs", "sampling.argmax", "speculation.draft_topk")
    with walkable(walker := Walker(), *names_of) as modules:
        kernels: Any = modules[-1]
        calls = kernels.draft_topk(
            logits,
            names,
            live,
            out=out[:, None],
            k=1,
            workspace=Memory("cpu"),
            best=None if alone else best_pairs(logits, INFINITY),
            children=children,
            child_rows=child_rows,
            child_ranks=torch.zeros(3, dtype=torch.int32),
            draft_nodes=nodes,
        )
        walker.run(*calls)
    lowest = [
        int((row == row.max()).nonzero()[0, 0]) if row.isfinite().all() or k == 3 else 0 for k, row in enumerate(logits)
    ]
    want = [int(names[place]) if k not in (1, 2) else -1 for k, place in enumerate(lowest)]
    assert out.tolist() == want
    assert nodes.tolist() == [[-77, *want[:3]], [-77, *want[3:]]]


@pytest.mark.parametrize("packed", [False, True])
def test_a_chain_s_drafts_bring_the_next_level_s_vectors(packed: bool) -> None:
    """Results of the operations one after the other; of a broken row, a dead one, and a slot that is dead."""
    logits, names, table = torch.randn(5, 100), torch.randperm(100, dtype=torch.int32), torch.randn(100, 264).bfloat16()
    logits[1, 99] = torch.nan
    live = torch.tensor([[1], [1], [0], [1], [1]], dtype=torch.uint8)
    tokens = torch.tensor([[3, 4]] * 4 + [[-1, -1]], dtype=torch.int32)
    child, zero = torch.tensor([2], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)

    def outs() -> dict[str, torch.Tensor]:
        return {
            "out": torch.full((5, 1), -77, dtype=torch.int32),
            "draft_nodes": torch.full((5, 4), -77, dtype=torch.int32),
            "parents": torch.full((5, 1), -77, dtype=torch.int32),
            "row_live": torch.full((5, 1), 77, dtype=torch.uint8),
            "vectors": torch.full((5, 264), torch.nan).bfloat16(),
        }

    want, got = outs(), outs()
    OPERATIONS["draft_topk"](logits, names, live, out=want["out"], k=1)
    OPERATIONS["assign_drafts"](want["out"], child, zero, zero, draft_nodes=want["draft_nodes"])
    level = {name: want[name] for name in ("parents", "row_live")}
    OPERATIONS["parent_tokens"](tokens, child, want["draft_nodes"], **level)
    OPERATIONS["embed"](want["parents"], table, out=want["vectors"])
    names_of = ("sampling.select", "sampling.row_pairs", "common.memory", "common.norm_row", "sampling.argmax")
    with walkable(walker := Walker(), *names_of) as modules:
        kernels: Any = modules[-1]
        weight = pack(table) if packed else table
        then = kernels.NextLevel(tokens, got["parents"], got["row_live"], weight, got["vectors"])
        assign = (child, zero, zero, got["draft_nodes"])
        best = best_pairs(logits, INFINITY)
        walker.run(*kernels.argmax(best, live, out=got["out"].reshape(-1), names=names, assign=assign, then=then))
    assert want["parents"].reshape(-1).tolist()[1:3] == [-1, -1] and int(want["draft_nodes"][4, 2]) >= 0
    assert int(want["parents"][4]) == -1
    assert all(torch.equal(got[name], want[name]) for name in want)
