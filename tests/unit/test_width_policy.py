"""The choice of widths, simulated: against the best width for all on recorded texts and at imposed acceptance, by times
of steps near an H200's, where drafting halts as well; and the measurement of those times, on a card that is made up."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench
from lowered import Pair
from stages import later

from lowlat.engine.loading import DRAFT_ENDS
from lowlat.graphs import Bucket, BufferSet
from lowlat.kernels.reference.speculation.width_odds import MAX_WIDTH
from lowlat.kernels.reference.speculation.widths import UNIT, choose_width
from lowlat.kernels.step.begin_step import CHOSEN
from lowlat.step.state import state_specs
from lowlat.step.width_costs import StepCosts, cost_table, depth_table
from lowlat.step.width_times import by_time

policy = bench("width_policy")
TEXTS = Path(__file__).parents[1] / "data" / "right_drafts.json"
DEMO = Path(__file__).parents[2] / "lowlat" / "demo"


def imposed(mean: float, seed: int, length: int = 600) -> list[Any]:
    """Two texts where the same number of drafts is right everywhere, or by a coin one more; confidences say nothing."""
    source = random.Random(seed)
    texts = ([int(mean - 1) + (source.random() < mean % 1) for _ in range(length)] for _ in range(2))
    return [policy.Text(text, [(2,) * MAX_WIDTH] * length) for text in texts]


def regimes(length: int = 3000, period: int = 500) -> list[Any]:
    """A text in which nearly no draft is right, and nearly all, by turns."""
    source = random.Random(3)
    text = []
    for place in range(length):
        rate, right = (0.05, 0.95)[place // period % 2], 0
        while right < MAX_WIDTH and source.random() < rate:
            right += 1
        text.append(right)
    return [policy.Text(text)]


def replay_of(name: str, ends: Sequence[int] = ()) -> Any:
    """A replay by the times of a pair, which are known."""
    return policy.Replay(policy.TIMES[name], policy.TIMES[name], ends)


def speeds(replay: Any, texts: list[Any]) -> tuple[float, list[float]]:
    """Tokens a us of chosen widths and of each fixed one, which take what a step of a body takes."""
    parts = [replay.run(text) for text in texts]
    chosen = sum(tokens for tokens, _ in parts) / sum(spent for _, spent in parts)
    steps_us = replay.times.step[: MAX_WIDTH + 1]
    return chosen, [policy.tokens_per_us(texts, us, width) for width, us in enumerate(steps_us)]


def gains_over(replay: Any, texts: Mapping[Any, list[Any]]) -> list[float]:
    """What the choice gains over the best fixed width, of each domain and temperature."""
    found = (speeds(replay, own) for own in texts.values())
    return [chosen / max(fixed) - 1 for chosen, fixed in found]


@pytest.mark.second
def test_on_recorded_texts_it_is_as_fast_as_the_best_width() -> None:
    """The bundled pair's, by domain and temperature: a runtime serves one after the other, and learns meanwhile."""
    steps, texts = policy.TIMES["bundled"].step, policy.read_texts(TEXTS)
    gains: dict[tuple[str, float], list[float]] = {key: [] for key in texts}
    idle = {key: policy.tokens_per_us(own, steps[0], 0) for key, own in texts.items()}
    for seed in range(2):
        replay = replay_of("bundled")
        for key in random.Random(seed).sample(list(texts), len(texts)):
            chosen, fixed = speeds(replay, texts[key])
            gains[key].append(chosen / max(fixed) - 1)
            assert chosen > 0.95 * idle[key], key
    assert len(gains) == 14
    means = {key: round(sum(each) / len(each), 3) for key, each in gains.items()}
    behind = {key: gain for key, gain in means.items() if gain < -0.01}
    assert len(behind) <= 4 and min(means.values()) > -0.035, behind
    assert sum(means.values()) / len(means) > 0.02


@pytest.mark.second
def test_on_texts_of_a_chat_model_it_is_near_the_best_width() -> None:
    """Of which one width is the best for nearly all: by domain and temperature, one after the other."""
    gains = gains_over(replay_of("chat"), policy.read_texts(TEXTS.with_name("right_drafts_chat.json")))
    assert len(gains) == 12
    assert sum(gains) / len(gains) > -0.0125 and min(gains) > -0.05, gains


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "halt_us", "mean", "least"),
    [("bundled", 5, 0.035, -0.04), ("llama", 20, 0.03, -0.02), ("mixture", 20, 0.055, -0.02)],
)
def test_halting_by_confidence_is_faster_on_recorded_texts(
    name: str, halt_us: float, mean: float, least: float
) -> None:
    """Than the choice without: against the best width by domain and temperature, in the mean and at worst.

    Where steps are short only if a halt takes less than it does on a card.
    """
    texts, times = policy.read_texts(TEXTS), replace(policy.TIMES[name], decision=halt_us)
    plain, halting = (gains_over(policy.Replay(times, times, ends), texts) for ends in ((), DRAFT_ENDS))
    assert sum(halting) > sum(plain) + 0.01 * len(texts)
    assert sum(halting) / len(texts) > mean and min(halting) > least, halting


@pytest.mark.parametrize(("name", "pays"), [("mixture", True), ("bundled", False)])
def test_halting_pays_where_a_draft_takes_much_longer_than_a_halt(name: str, pays: bool) -> None:
    """On a few texts."""
    texts = {key: own[:1] for key, own in policy.read_texts(TEXTS).items()}
    plain, halting = (sum(gains_over(replay_of(name, ends), texts)) for ends in ((), DRAFT_ENDS))
    gain = (halting - plain) / len(texts)
    assert gain > 0.02 if pays else gain < -0.02


def test_drafts_are_right_as_often_as_their_confidence_says() -> None:
    kinds = policy.calibration([text for own in policy.read_texts(TEXTS).values() for text in own])
    bounds = [*(kind["at_least"] for kind in kinds), 1.0]
    for kind, low, high in zip(kinds, bounds, bounds[1:], strict=False):
        assert low - 0.02 < kind["right"] < high + 0.02 and kind["drafts"] > 1000, kind


@pytest.mark.parametrize("name", ["llama", later("mixture")])
@pytest.mark.parametrize("mean", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_at_imposed_acceptance_it_is_near_the_best_width(name: str, mean: float) -> None:
    """Within a hundredth once two requests have shown what is right, and not far from it while they do."""
    replay = replay_of(name)
    for seed, least in ((3, 0.975), (5, 0.99)):
        chosen, fixed = speeds(replay, imposed(mean, seed))
        assert chosen > least * max(fixed), (seed, chosen / max(fixed), fixed.index(max(fixed)))


@pytest.mark.parametrize(
    ("name", "mean"), [("llama", 3.0), later("llama", 1.0), later("mixture", 1.5), later("mixture", 2.0)]
)
def test_confidences_that_say_nothing_cost_little(name: str, mean: float) -> None:
    """Beside the choice without; a mean of 4.0 is left out, whose best width is not the end of a block."""
    plain, halting = replay_of(name), replay_of(name, DRAFT_ENDS)
    for seed in (3, 5):
        texts = imposed(mean, seed)
        assert speeds(halting, texts)[0] > 0.985 * speeds(plain, texts)[0], seed


def test_it_goes_beyond_any_width_where_texts_change() -> None:
    chosen, fixed = speeds(replay_of("bundled"), regimes())
    assert chosen > 1.2 * max(fixed)


@pytest.mark.parametrize("ends", [(), DRAFT_ENDS], ids=["plain", "halting"])
def test_times_that_are_a_little_off_cost_little(ends: Sequence[int]) -> None:
    """A constant in all of them makes drafts look cheaper than they are."""
    times = policy.TIMES["bundled"]
    texts = policy.read_texts(TEXTS)["prose", 0.7]
    exact, _ = speeds(policy.Replay(times, times, ends), texts)
    off, _ = speeds(policy.Replay(times, replace(times, step=[each + 5 for each in times.step]), ends), texts)
    assert off > 0.98 * exact


def test_steps_that_halted_cost_the_blocks_that_they_drafted() -> None:
    """Levels of 40, rows of 10 and halts of 3: of blocks that are measured by their widths, the costs come out."""
    times = policy.Times([100 + 50 * width for width in range(8)] + [110], 40, 3)
    known = torch.tensor([[times.measured((1, 2, 4))] * 2], dtype=torch.int32)
    table = depth_table(known, (1, 2, 4))
    assert table.shape == (1, 2, 3, 8) and torch.equal(table[:, 0], table[:, 1])
    for end, (depth, halts) in enumerate(((1, 1), (2, 2), (4, 3))):
        assert table[0, 0, end, 1 : depth + 1].tolist() == [times.of(w, depth, halts) for w in range(1, depth + 1)]
        assert torch.equal(table[0, 0, end, depth + 1 :], known[0, 0, depth + 1 : -1])


def test_levels_cost_no_more_than_a_block_does_and_nothing_where_it_costs_less() -> None:
    widths = torch.tensor([[[100, 150, 155, 140, 200, 260, 270, 280, 110]] * 2], dtype=torch.int32)
    table = depth_table(widths, (1, 2, 4))[0, 0]
    assert table.tolist() == [
        [150, 150, 155, 140, 200, 260, 270, 280],
        [150, 150, 155, 140, 200, 260, 270, 280],
        [150, 150, 155, 140, 200, 260, 270, 280],
    ]


@dataclass
class Mark:
    """A point in a stream."""

    us: float

    def elapsed_time(self, end_event: "Mark") -> float:
        """Milliseconds."""
        return (end_event.us - self.us) / 1000


class Card:
    """A card that chooses by the reference and whose bodies take what they are given; the host launches for so long.

    step_us       of a body of a bucket of one slot behind no position
    position_ns   that each position adds to it, twice as many where drafts are made
    """

    name = "graph"
    device = torch.device("cpu")

    def __init__(self, state: BufferSet, num_waiting: int, launch_us: float) -> None:
        self.state, self.num_waiting, self.launch_us = state, num_waiting, launch_us
        self.host_us = self.free_us = 0.0
        self.num_steps = 0

    def cost(self, bucket: Bucket, body: int, positions: int) -> float:
        """Microseconds of a step."""
        slots = 0.9 + 0.1 * bucket.batch
        us: float = policy.TIMES["bundled"].step[body]
        return us * slots + positions * (0.02 if 1 <= body <= MAX_WIDTH else 0.01)

    def step(self, bucket: Bucket) -> None:
        """Launch a step; the device begins it when it has done what was before."""
        state = self.state
        named = {name: state[name] for name in CHOSEN}
        choose_width(**named, row=bucket.batch - 1, most_waiting=self.num_waiting)
        body, active = int(state["width_choice"]), state["active"].bool()
        us = self.cost(bucket, body, int(state["lengths"][active].sum()))
        if body:
            state["extended"][active] = state["lengths"][active] - 1
        state["lengths"][active] += 1
        self.num_steps += 1
        self._run(self.launch_us, us)

    def _run(self, host_us: float, device_us: float) -> None:
        self.host_us += host_us
        self.free_us = max(self.free_us, self.host_us) + device_us

    def mark(self) -> Mark:
        """An event, which an idle device passes at once."""
        self._run(2.0, 0.0)
        return Mark(self.free_us)

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy."""
        for name, tensor in values.items():
            self.state[name].copy_(tensor)
            self._run(5.0, 2.0)

    def synchronize(self) -> None:
        """Wait."""
        self.host_us = max(self.host_us, self.free_us)

    def forget(self) -> None:
        """Nothing is looked at afterwards."""


@pytest.mark.parametrize("launch_us", [5.0, 40.0])
def test_times_are_those_of_steps_that_follow_each_other(launch_us: float) -> None:
    """Of every body, whatever a launch takes, at any number of positions, and with the draft model's share."""
    pair = Pair(DEMO / "target", DEMO / "head", adaptive_width=True, num_speculative_tokens=MAX_WIDTH)
    geometry = replace(pair.geometry, max_context=4096, max_batch=2)
    card = Card(BufferSet(state_specs(geometry), torch.device("cpu")), geometry.num_waiting, launch_us)
    buckets = [Bucket(batch, MAX_WIDTH + 1, MAX_WIDTH, chooses=True) for batch in (2, 1)]
    costs = by_time(card, buckets, geometry.num_waiting)
    for bucket in buckets:
        for positions in (200, 2000, 5000):
            found = costs[bucket].at(positions)
            for body in range(MAX_WIDTH + 2):
                true = card.cost(bucket, body, positions) / 1000
                assert found[body] == pytest.approx(true, rel=0.01), (bucket, body, positions)
    assert card.num_steps < 10000 and not card.state["width_bounds"].any()
    shape = card.state["width_costs"].shape
    table = cost_table(shape, costs, geometry.max_context, geometry.num_waiting)[0].double()
    told = table[0] + table[1] * 3000 / (1 << UNIT)
    share = (costs[buckets[1]].at(3000)[-1] - costs[buckets[1]].at(3000)[0]) / geometry.num_waiting
    expected = torch.tensor(costs[buckets[1]].at(3000)).double()
    expected[0] += share
    assert torch.allclose(told / told[1], expected / expected[1], rtol=1e-4)


def test_a_line_through_one_point_is_level() -> None:
    level = StepCosts.between([2.0, 3.0], [2.0, 3.0], (100, 100))
    assert level.at(0) == level.at(5000) == [2.0, 3.0]
    falling = StepCosts.between([2.0, 3.0], [1.9, 4.0], (100, 1100))
    assert falling.at(1100) == pytest.approx([2.0, 4.0]) and falling.per_position[0] == 0.0
