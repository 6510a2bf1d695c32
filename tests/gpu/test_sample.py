"""The sampling kernels: tokens of the reference but for near-ties, and a draw that depends on nothing else."""

from typing import Any

import pytest
import torch
from sampling_cases import World
from selection_cases import Memory, best_pairs, draw_scores, make_world
from unit.kernels.test_sample_distribution import check_draws_under_a_mask

from lowlat.executors.launcher import Launcher
from lowlat.kernels.reference.sampling import sample as reference
from lowlat.kernels.sampling.row_pairs import finite
from lowlat.kernels.sampling.sample import sample
from lowlat.kernels.sampling.select import FINITE

SEED = 1234567890123456789
OPTIONS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition": 1.3, "presence": 0.7, "frequency": 0.4},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.7, "seed": (1 << 63) - 1, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.6, "seed": 3, "top_p": 0.6, "repetition": 0.8, "presence": -1.0, "min_tokens": 9},
    {"temperature": 1.0, "seed": SEED, "top_k": 1500},
    {"temperature": 1.3, "seed": 8, "top_p": 0.95, "frequency": 0.3},
    {"temperature": 0.05, "seed": 9, "min_p": 0.2},
    {"temperature": 1e-38, "seed": 11, "top_p": 0.5},
    {"temperature": 100.0, "seed": 12, "top_p": 0.99, "top_k": 3, "min_tokens": 100},
    {"temperature": 0.0, "has_grammar": 1},
    {"temperature": 0.8, "seed": 13, "frequency": 0.2, "top_p": 0.9, "has_grammar": 1},
]
SMALL, LARGE = (5, 97, 4096, 4104, 32001), (128256, 201088, 262208)
CASES = [(vocabulary, kind) for vocabulary in SMALL for kind in ("smooth", "ties", "peaked", "flat")]
CASES += [(vocabulary, "smooth") for vocabulary in LARGE]
NEAR = 1e-4


class Nodes:
    """The rows of a bucket: a chain of two and a third node next to its second."""

    def __init__(self, logits: torch.Tensor, slots: list[int], live: list[list[int]] | None = None) -> None:
        batch, rows = len(slots), logits.shape[0] // len(slots)
        self.logits, self.slots = logits, torch.tensor(slots, dtype=torch.int32)
        self.live = torch.tensor(live or [[int(slot >= 0)] * rows for slot in slots], dtype=torch.uint8)
        self.tokens = torch.arange(rows, dtype=torch.int32).repeat(batch, 1) % min(3, logits.shape[1])
        bits = [1, *(1 | 2 | 1 << node for node in range(1, rows))]
        self.masks = torch.tensor([[mask - (mask >> 63 << 64) for mask in bits]] * batch)

    def outputs(self) -> dict[str, torch.Tensor]:
        shape = self.tokens.shape
        tokens = torch.full(shape, -77, dtype=torch.int32)
        return {"target_tokens": tokens, "finite": torch.full(shape, 9, dtype=torch.uint8)}

    def reference(self, world: World) -> dict[str, torch.Tensor]:
        out = self.outputs()
        arguments = (self.logits, self.live, self.tokens, self.masks, self.slots, *world.state().values())
        reference.sample(*arguments, target_tokens=out["target_tokens"])
        reference.finite(self.logits, self.live, finite=out["finite"])
        return out

    def kernel(self, world: World, launcher: Launcher) -> dict[str, torch.Tensor]:
        out, memory = {name: array.cuda() for name, array in self.outputs().items()}, Memory("cuda")
        arguments: list[Any] = [self.logits, self.live, self.tokens, self.masks, self.slots, *world.state().values()]
        arguments = [array.cuda() for array in arguments]
        best, first = best_pairs(self.logits, FINITE, 132).cuda(), list[torch.Tensor]()
        for _ in range(3):  # the same bits again, and counters as they were
            out["target_tokens"].fill_(-77)
            launcher.run(*sample(*arguments, **out, best=best, workspace=memory))
            first = first or [out["target_tokens"].clone()]
            assert torch.equal(first[0], out["target_tokens"])
        flags = out["finite"].clone()
        out["target_tokens"].fill_(-77), out["finite"].fill_(9)
        launcher.run(*finite(arguments[0], arguments[1], finite=out["finite"], workspace=memory))
        launcher.run(*sample(*arguments, target_tokens=out["target_tokens"], workspace=memory))
        assert torch.equal(first[0], out["target_tokens"]) and torch.equal(flags, out["finite"])
        assert memory.at_rest()
        return {name: array.cpu() for name, array in out.items()}


@pytest.mark.parametrize(("vocabulary", "kind"), CASES)
def test_tokens_of_the_reference(launcher: Launcher, vocabulary: int, kind: str) -> None:
    world = make_world(vocabulary, OPTIONS, (1, 3, 4))
    slots = [*range(len(OPTIONS)), -1]
    logits = torch.randn(3 * len(slots), vocabulary) * {"peaked": 12.0, "flat": 0.0}.get(kind, 3.0)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    nodes = Nodes(logits, slots)
    found, expected = nodes.kernel(world, launcher), nodes.reference(world)
    assert torch.equal(found["finite"], expected["finite"])
    differing = (found["target_tokens"] != expected["target_tokens"]).nonzero().tolist()
    for index, node in differing:
        mask = int(nodes.masks[index, node])
        scores = draw_scores(world, logits[index * 3 + node], slots[index], nodes.tokens[index].tolist(), mask, node)
        ours, theirs = (int(out["target_tokens"][index, node]) for out in (found, expected))
        assert float(scores[theirs] - scores[ours]) <= NEAR, (OPTIONS[slots[index]], ours, theirs)
    assert len(differing) <= 1


@pytest.mark.parametrize("vocabulary", [97, 128256])
def test_broken_and_extreme_rows(launcher: Launcher, vocabulary: int) -> None:
    world = make_world(vocabulary, OPTIONS, (1, 3, 4))
    for options in range(len(OPTIONS)):
        logits = torch.randn(9, vocabulary)
        logits[0, vocabulary - 1], logits[1, 0], logits[2, 7] = torch.nan, torch.inf, -torch.inf
        logits[3, 11] = 1e30
        logits[4] = -3e38
        logits[5] = 3e38
        nodes = Nodes(logits, [options, options, -1], [[1, 1, 1], [1, 1, 0], [0, 0, 0]])
        found, expected = nodes.kernel(world, launcher), nodes.reference(world)
        assert torch.equal(found["finite"], expected["finite"])
        assert torch.equal(found["target_tokens"], expected["target_tokens"])


@pytest.mark.parametrize("vocabulary", [1003, 128256])
def test_a_draw_is_the_same_in_any_company(launcher: Launcher, vocabulary: int) -> None:
    world = make_world(vocabulary, OPTIONS, (1, 3, 4))
    rows = torch.randn(2, vocabulary) * 3
    for slot in range(len(OPTIONS)):
        alone = Nodes(rows.clone(), [slot]).kernel(world, launcher)["target_tokens"][0].tolist()
        for batch, width, place in ((1, 4, 0), (4, 3, 2), (8, 2, 5)):
            logits = torch.randn(batch * width, vocabulary) * 30
            logits[place * width : place * width + 2] = rows
            slots = [other for other in [*range(len(OPTIONS)), -1] if other != slot][:batch]
            slots[place] = slot
            nodes = Nodes(logits, slots)
            assert nodes.kernel(world, launcher)["target_tokens"][place, :2].tolist() == alone


def test_everything_banned_gives_token_zero(launcher: Launcher) -> None:
    world = World(2, 1)
    world.set(0, min_tokens=100, temperature=1.0)
    world.stop_ids[0, :2] = torch.tensor([0, 1])
    assert Nodes(torch.zeros(1, 2), [0]).kernel(world, launcher)["target_tokens"].tolist() == [[0]]


def test_draws_under_a_mask_follow_what_it_leaves(launcher: Launcher) -> None:
    def draw(world: World, logits: torch.Tensor) -> torch.Tensor:
        nodes = Nodes(logits, [0])
        nodes.masks = torch.tensor([[(1 << (node + 1)) - 1 for node in range(len(logits))]])
        return nodes.kernel(world, launcher)["target_tokens"][0]

    check_draws_under_a_mask(draw, seed=12)


def test_a_large_tree(launcher: Launcher) -> None:
    world = make_world(32000, OPTIONS, (1, 3, 4))
    nodes = Nodes(torch.randn(64 * 2, 32000) * 3, [0, 3])
    found, expected = nodes.kernel(world, launcher), nodes.reference(world)
    assert int((found["target_tokens"] != expected["target_tokens"]).sum()) <= 1
