"""The choice of draft lengths, simulated: against the best one for all on recorded texts and at imposed acceptance, by
times of steps near an H200's; and the measurement of those times, on a GPU that is made up."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_length_replay import Replay, imposed, speeds
from lowered import Pair
from stages import later

from lowlat.graphs import Bucket, BufferSet
from lowlat.graphs.program import Stage
from lowlat.kernels.reference.speculation.draft_lengths import UNIT, choose_draft_length
from lowlat.kernels.reference.speculation.length_probabilities import MAX_LENGTH
from lowlat.kernels.toolchain.launches import among
from lowlat.step.draft_length_costs import StepCosts, cost_table
from lowlat.step.draft_length_times import by_time
from lowlat.step.state import state_specs
from lowlat.step.variants import choice_bucket

TEXTS = Path(__file__).parents[1] / "data" / "right_drafts.json"  # of the bundled pair: right drafts at each position
DEMO = Path(__file__).parents[2] / "lowlat" / "demo"
TIMES_US: dict[str, Sequence[float]] = {  # of a step of length 0 to 7, and of zero with the draft model, near an H200's
    "bundled": (141, 183, 224, 246, 300, 329, 348, 366, 165),
    "llama": (3700, 3990, 4260, 4480, 4860, 5150, 5400, 5580, 3760),
    "mixture": (1790, 2210, 2570, 2930, 3290, 3650, 4010, 4370, 1850),
}


def recorded() -> dict[tuple[str, float], list[list[int]]]:
    """Recorded texts by domain and temperature."""
    rows = json.loads(TEXTS.read_text())["rows"]
    return {(row["domain"], row["temperature"]): [list(map(int, text)) for text in row["texts"]] for row in rows}


def regimes(length: int = 2000, period: int = 500) -> list[list[int]]:
    """A text in which nearly no draft is right, and nearly all, by turns."""
    source = random.Random(3)
    text = []
    for place in range(length):
        rate, right = (0.05, 0.95)[place // period % 2], 0
        while right < MAX_LENGTH and source.random() < rate:
            right += 1
        text.append(right)
    return [text]


@pytest.mark.second
def test_on_recorded_texts_it_is_as_fast_as_the_best_length() -> None:
    """By domain and temperature: a runtime serves one after the other, and learns meanwhile."""
    texts, gains = recorded(), {}
    replay = Replay(TIMES_US["bundled"])
    for key in random.Random(0).sample(list(texts), len(texts)):
        chosen, fixed = speeds(replay, texts[key])
        gains[key] = round(chosen / max(fixed) - 1, 3)
        assert chosen > 0.95 * fixed[0], key
    behind = {key: gain for key, gain in gains.items() if gain < -0.01}
    assert len(gains) == 14 and len(behind) <= 4 and min(gains.values()) > -0.05, behind
    assert sum(gains.values()) / len(gains) > 0.02


@pytest.mark.parametrize(("name", "mean"), [("llama", 1.0), later("llama", 3.0), later("mixture", 4.0)])
def test_at_imposed_acceptance_it_is_near_the_best_length(name: str, mean: float) -> None:
    """Within a hundredth once two requests have shown what is right, and not far from it while they do."""
    replay = Replay(TIMES_US[name])
    for seed, least in ((3, 0.975), (5, 0.99)):
        chosen, fixed = speeds(replay, imposed(mean, seed))
        assert chosen > least * max(fixed), (seed, chosen / max(fixed), fixed.index(max(fixed)))


def test_it_goes_beyond_any_draft_length_where_texts_change() -> None:
    chosen, fixed = speeds(Replay(TIMES_US["bundled"]), regimes())
    assert chosen > 1.2 * max(fixed)


def test_times_that_are_a_little_off_cost_little() -> None:
    """A constant in all of them makes drafts look cheaper than they are."""
    times, texts = TIMES_US["bundled"], recorded()["prose", 0.7]
    exact, _ = speeds(Replay(times), texts)
    off, _ = speeds(Replay(times, [each + 5 for each in times]), texts)
    assert off > 0.98 * exact


@dataclass
class Mark:
    """A point in a stream."""

    us: float

    def elapsed_time(self, end_event: "Mark") -> float:
        """Milliseconds."""
        return (end_event.us - self.us) / 1000


class Gpu:
    """A GPU that chooses by the reference and whose bodies take what they are given; the host launches for so long.

    step_us       of a body of a bucket of one slot after no position
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
        us: float = TIMES_US["bundled"][body]
        return us * slots + positions * (0.02 if 1 <= body <= MAX_LENGTH else 0.01)

    def step(self, bucket: Bucket) -> None:
        """Launch a step; the device begins it when it has done what was before."""
        state = self.state
        named = among(choose_draft_length, state)
        choose_draft_length(**named, row=bucket.batch - 1, most_waiting=self.num_waiting)
        body, active = int(state["draft_length_choice"]), state["active"].bool()
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

    def program(self, bucket: Bucket) -> Any:
        """Two layers with experts, of which the draft model's is none."""
        stages = (Stage.VERIFY, Stage.DRAFT, Stage.VERIFY)
        return SimpleNamespace(
            ops=[
                SimpleNamespace(kind="router", stage=stage, writes={"expert_ids": f"ids.{number}"})
                for number, stage in enumerate(stages)
            ]
        )

    def scratch(self, bucket: Bucket) -> Any:
        """Every row chose two experts of its own in the first layer, and all the same two in the last."""
        rows = torch.arange(bucket.batch * bucket.rows)[:, None]
        return {"ids.0": rows * 2 + torch.arange(2), "ids.2": torch.tensor([[5, -1], [6, 5]])}


@pytest.mark.parametrize("launch_us", [5.0, 40.0])
def test_times_are_those_of_steps_that_follow_each_other(launch_us: float) -> None:
    """Of every body, whatever a launch takes, at any number of positions, and with the draft model's share."""
    pair = Pair(DEMO / "target", DEMO / "head", adaptive_width=True, num_speculative_tokens=MAX_LENGTH)
    geometry = replace(pair.geometry, max_context=4096, max_batch=2)
    gpu = Gpu(BufferSet(state_specs(geometry), torch.device("cpu")), geometry.num_waiting, launch_us)
    buckets = [choice_bucket(batch, MAX_LENGTH) for batch in (2, 1)]
    costs = by_time(gpu, buckets, geometry.num_waiting, 0.25)
    for bucket in buckets:
        rows = [*range(1, MAX_LENGTH + 2), 1]
        assert (
            costs[bucket].experts == [1.0 + bucket.batch * each for each in rows] and costs[bucket].per_expert == 0.25
        )
        for positions in (200, 2000, 5000):
            found = costs[bucket].at(positions)
            for body in range(MAX_LENGTH + 2):
                true = gpu.cost(bucket, body, positions) / 1000
                assert found[body] == pytest.approx(true, rel=0.01), (bucket, body, positions)
    assert gpu.num_steps < 10000 and not gpu.state["length_bounds"].any()
    shape = gpu.state["draft_length_costs"].shape
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
