"""Draws of tokens: history, bans, cut-offs and ties, and that a draw depends on nothing else."""

from typing import Any

import pytest
import torch
from sampling_cases import World

from lowlat.errors import ShapeError
from lowlat.kernels.reference.sampling.random import gumbel
from lowlat.kernels.reference.sampling.sample import finite, keep, lowest_argmax, penalise

INF = float("inf")
SAMPLED: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition": 1.3, "presence": 0.7, "frequency": 0.4},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.7, "seed": (1 << 63) - 1, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.6, "seed": 3, "top_p": 0.6, "repetition": 0.8, "presence": -1.0, "min_tokens": 9},
]


@pytest.mark.parametrize("options", SAMPLED)
@pytest.mark.parametrize("vocabulary", [5, 64, 1003])
def test_a_draw_is_the_same_in_any_company(vocabulary: int, options: dict[str, float], device: str) -> None:
    world = World(vocabulary, 6, device)
    for slot in range(6):
        world.set(slot, **SAMPLED[slot % len(SAMPLED)])
    world.set(3, length=77, prompt_length=70, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})
    world.prompt_seen.random_(0, 2)
    world.output_counts.random_(0, 3)
    world.stop_ids[:, 1] = 2
    world.bias(3, {1: 2.5, 4: -3.0}, first=7)
    row = torch.randn(vocabulary) * 3
    alone = world.draw(row[None], [3], [[4]], [[1]])[0][0]
    deep = world.draw(row.repeat(3, 1), [3], [[4, 1, 2]], [[1, 3, 5]], [[0, 0, 1]])[0]
    assert deep[:2] == [-1, -1]
    for batch, rows in ((1, 4), (3, 3), (5, 1)):
        for index in range(batch):
            logits = torch.randn(batch * rows, vocabulary) * 30
            logits[index * rows] = row
            live = torch.randint(0, 2, (batch, rows)).tolist()
            tokens = torch.randint(0, vocabulary, (batch, rows)).tolist()
            masks = [[1, *(1 | 1 << node for node in range(1, rows))] for _ in range(batch)]
            live[index][0], tokens[index][0] = 1, 4
            slots = [slot for slot in (0, 5, -1, 1, 2) if slot != 3][:batch]
            slots[index] = 3
            if rows > 2:
                logits[index * rows + 2], live[index][2], tokens[index][2] = row, 1, 2
            got = world.draw(logits, slots, tokens, masks, live)
            assert got[index][0] == alone
            if rows > 2:
                assert got[index][2] == deep[2]
            dead = [slot < 0 or not alive for slot, line in zip(slots, live, strict=True) for alive in line]
            assert [token == -1 for line in got for token in line] == dead


@pytest.mark.parametrize("vocabulary", [7, 64, 999])
def test_the_sampled_row_is_the_largest_of_logits_and_noise(vocabulary: int, device: str) -> None:
    world, logits = World(vocabulary, 1, device), torch.randn(12, vocabulary) * 4
    world.set(0, temperature=0.75, seed=1234567890123, length=40)
    got = world.draw(logits, [0])[0]
    for node, row in enumerate(logits):
        noise = gumbel(1234567890123, 40 + node, vocabulary, torch.device("cpu"))
        score = (row.double() - row.double().max()) / 0.75 + noise.double()
        assert float(score.max() - score[got[node]]) < 1e-5


def test_the_position_keys_the_draw_whatever_the_tree() -> None:
    world, logits = World(500, 2), torch.zeros(6, 500)
    world.set(0, temperature=1.0, seed=9, length=20)
    world.set(1, temperature=1.0, seed=9, length=23)
    chain = world.draw(logits, [0])[0]
    assert len(set(chain)) > 3
    assert world.draw(logits[:3], [1])[0] == chain[3:]
    tree = world.draw(logits, [0], masks=[[1, 3, 5, 11, 21, 43]])[0]  # depths 0 1 1 2 2 3
    assert tree == [chain[depth] for depth in (0, 1, 1, 2, 2, 3)]
    far = 1 | 1 << 40 | -(1 << 63)  # bit 63 makes the packed mask negative
    wide = torch.zeros(64, 500)
    assert world.draw(wide, [0], masks=[[far] * 64])[0] == [chain[2]] * 64


def test_penalties_count_a_nodes_own_drafted_ancestors_once_and_not_the_root() -> None:
    world = World(6, 2)
    world.set(1, frequency=1.0)
    world.output_counts[1, 5] = 3  # the root: committed and counted already
    row = torch.tensor([0.0, 0.0, 2.5, 1.6, 0.6, 4.5])
    tokens = [[5, 2, 2, 3, 5]]
    masks = [[0b1, 0b11, 0b111, 0b1001, 0b10001]]
    # node: counts of (2, 3, 5) are 0 0 3; 1 0 3; 2 0 3; 0 1 3; 0 0 4
    assert world.draw(row.repeat(5, 1), [1], tokens, masks)[0] == [2, 3, 3, 2, 2]
    row[5] = 5.6  # wins by 0.1 with count 3: a root counted again would lose
    assert world.draw(row.repeat(5, 1), [1], tokens, masks)[0] == [5, 5, 5, 5, 2]
    row[5] = 4.5
    assert world.output_counts[1].tolist() == [0, 0, 0, 0, 0, 3]
    world.set(1, frequency=0.0, presence=1.0)
    assert world.draw(row.repeat(5, 1), [1], tokens, masks)[0] == [5, 5, 5, 5, 5]
    world.set(1, presence=2.0)
    assert world.draw(row.repeat(5, 1), [1], tokens, masks)[0] == [2, 5, 5, 2, 2]
    world.set(1, presence=0.0, repetition=2.0)
    world.prompt_seen[1, 2] = 1
    assert world.draw(torch.tensor([[-3.0, 0.0, 2.6, 1.5, -1.0, 2.8]] * 2), [1], [[5, 3]], [[1, 3]])[0] == [3, 5]


def test_min_tokens_bans_stop_ids_by_each_nodes_position() -> None:
    world, row = World(8), torch.tensor([0.0, 5.0, 0.0, 3.0, 0.0, 0.0, 0.0, 4.0])
    world.set(0, length=12, prompt_length=10, min_tokens=4)  # 2 generated; the draw after node d is number 3 + d
    world.stop_ids[0, 0], world.stop_ids[0, 31], world.stop_ids[0, 5] = 1, 7, 8  # 8: outside the vocabulary
    assert world.draw(row.repeat(4, 1), [0])[0] == [3, 3, 1, 1]
    world.set(0, temperature=1e-3)
    assert world.draw(row.repeat(4, 1), [0])[0] == [3, 3, 1, 1]
    tiny = World(2, 1)
    tiny.set(0, min_tokens=100, temperature=1.0)
    tiny.stop_ids[0, :2] = torch.tensor([0, 1])
    assert tiny.draw(torch.zeros(1, 2), [0]) == [[0]]  # everything banned: still a token


def test_biases_are_added_to_their_tokens() -> None:
    world = World(400, 2)
    world.bias(1, {300: 100.0, 399: 100.5}, first=298)
    world.bias(0, {3: -100.0})
    logits = torch.zeros(2, 400)
    logits[0, 3], logits[1, 3] = 5.0, 5.0
    assert world.draw(logits, [0, 1]) == [[0], [399]]


def test_ties_go_to_the_lowest_id() -> None:
    world = World(130, 2)
    world.set(1, temperature=1e-30, seed=1)
    logits = torch.full((3, 130), -2.0)
    logits[0, [40, 90]] = 1.5
    logits[1] = 0.0
    logits[2, [128, 129]] = torch.tensor([-0.0, 0.0])
    assert world.draw(logits, [0])[0] == [40, 0, 128]
    assert world.draw(logits, [1])[0][0] in (40, 90)
    assert lowest_argmax(torch.tensor([-INF, 3.0, 3.0, -INF])) == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-6, 1.0, 100.0])
def test_extreme_logits(temperature: float, device: str) -> None:
    world = World(67, 1, device)
    options: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition": 0.01, "presence": 2.0}
    logits = torch.randn(4, 67)
    logits[0, 11] = 1e30
    logits[1] = -1e30
    logits[1, 60] = 1e30
    logits[2] = 3e38
    logits[3] = -3e38
    world.set(0, temperature=temperature, seed=77)
    got = world.draw(logits, [0])[0]
    assert got[:2] == [11, 60]
    assert all(0 <= token < 67 for token in got)
    world.set(0, **options)
    world.prompt_seen.fill_(1)
    got = world.draw(logits, [0])[0]
    assert got[:2] == [11, 60]
    assert all(0 <= token < 67 for token in got)


def test_rows_that_are_not_finite_are_flagged_and_drawn_as_zero() -> None:
    world, logits = World(9), torch.randn(6, 9) + torch.arange(9) * 10
    for row, value in ((1, float("nan")), (2, INF), (4, -INF)):
        logits[row, 5] = value
    world.set(0, temperature=1.0)
    assert [token == 0 for token in world.draw(logits, [0])[0]] == [False, True, True, False, True, False]
    flags = torch.full((2, 3), 9, dtype=torch.uint8)
    finite(logits, torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.uint8), finite=flags)
    assert flags.tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(ShapeError, match="logits"):
        finite(logits[:5], torch.ones(6, dtype=torch.uint8), finite=flags)
    with pytest.raises(ShapeError, match="logits"):
        world.draw(torch.zeros(4, 8), [0])


def brute_force_keep(scaled: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The definition, token by token, in Python's own arithmetic."""
    probabilities = [2.718281828459045**value for value in scaled]
    ordered = sorted(scaled, reverse=True)
    bound = ordered[top_k - 1] if 0 < top_k < len(scaled) else -INF
    kept = [value >= bound for value in scaled]
    total = sum(odd for odd, stays in zip(probabilities, kept, strict=True) if stays)
    if top_p < 1:
        above = [sum(o for o, s, k in zip(probabilities, scaled, kept, strict=True) if k and s > v) for v in scaled]
        kept = [stays and mass < top_p * total for stays, mass in zip(kept, above, strict=True)]
    return [stays and odd >= min_p for stays, odd in zip(kept, probabilities, strict=True)]


@pytest.mark.parametrize("vocabulary", [1, 3, 50])
def test_cut_offs_keep_what_their_definition_says_ties_included(vocabulary: int) -> None:
    for seed in range(120):
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(-20, 1, (vocabulary,), generator=generator) * 0.37
        scaled = (steps - steps.max()).float()
        top_k = int(torch.randint(0, vocabulary + 3, (), generator=generator))
        top_p, min_p = (0.05 + 0.9 * float(torch.rand((), generator=generator)) for _ in range(2))
        for options in ((top_k, 1.0, 0.0), (0, top_p, 0.0), (0, 1.0, min_p * 0.5), (top_k, top_p, min_p * 0.3)):
            assert keep(scaled, *options).tolist() == brute_force_keep(scaled.tolist(), *options), options


def test_cut_offs_and_penalties_equal_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, 211, generator=generator) * 3
        history = torch.randint(0, 211, (1, 30), generator=generator)
        counts, prompt = torch.zeros(211, dtype=torch.int32), torch.zeros(211, dtype=torch.uint8)
        prompt[history[0, :17]] = 1
        counts.index_add_(0, history[0, 17:], torch.ones(13, dtype=torch.int32))
        repetition, temperature = 0.5 + seed / 20, 0.3 + seed / 30
        theirs = processors.RepetitionPenaltyLogitsProcessor(repetition)(history, logits)
        zero = torch.tensor(0.0)
        ours = penalise(logits[0], prompt, counts, torch.tensor(repetition), zero, zero)
        torch.testing.assert_close(ours, theirs[0])
        theirs = processors.TemperatureLogitsWarper(temperature)(history, theirs)
        scaled = (ours - ours.max()) / torch.tensor(temperature)
        torch.testing.assert_close(torch.softmax(scaled, 0), torch.softmax(theirs[0], 0), rtol=1e-4, atol=1e-7)
        for top_k, top_p, min_p in ((7, 1.0, 0.0), (0, 0.83, 0.0), (0, 1.0, 0.04), (40, 0.9, 0.02), (500, 0.5, 0.0)):
            expected = theirs
            if top_k:
                expected = processors.TopKLogitsWarper(top_k)(history, expected)
            if top_p < 1:
                expected = processors.TopPLogitsWarper(top_p)(history, expected)
            if min_p:
                expected = processors.MinPLogitsWarper(min_p)(history, expected)
            assert torch.equal(keep(scaled, top_k, top_p, min_p), expected[0] > -INF)


def test_presence_and_frequency_follow_their_formula() -> None:
    logits, counts = torch.randn(90) * 5, torch.randint(0, 4, (90,), dtype=torch.int32)
    prompt = torch.randint(0, 2, (90,), dtype=torch.uint8)
    one = torch.tensor(1.0)
    got = penalise(logits, prompt, counts, one, torch.tensor(0.7), torch.tensor(-1.3))
    expected = [x - 0.7 * (c > 0) + 1.3 * c for x, c in zip(logits.tolist(), counts.tolist(), strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected))
