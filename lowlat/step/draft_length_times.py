"""This module measures the times of captured steps by draft length, by which the device chooses draft lengths.

Steps are timed back to back, so that launches do not count; with sampling, and over random tokens. They are timed at a
short and a long context; times at other contexts lie on the line through both. The experts that the rows chose are
counted, so that a time can be corrected for other numbers of experts. Times are kept in the user's cache, and read
there for the same GPU, models and sizes.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, cast

import torch

from lowlat.graphs import Bucket, BufferSet, Paging
from lowlat.graphs.program import Program
from lowlat.kernels.reference.step.slot_record import (
    DRAFT_LIMIT,
    MAX_LENGTH,
    NUM_INTS,
    NUM_LOGPROBS,
    REPETITION,
    TEMPERATURE,
    TOP_P,
)
from lowlat.models.layer_spec import ExpertsSpec
from lowlat.options.directories import cache_directory
from lowlat.options.installed import installed_version
from lowlat.step.draft_length_costs import Costs, StepCosts, by_bytes, cost_table, expert_bytes
from lowlat.step.expert_counts import distinct_experts
from lowlat.step.ladder import StepLadder
from lowlat.step.state import StepGeometry
from lowlat.step.variants import bodies_of

__all__ = ["by_time", "set_costs", "write_costs"]

PAGED = (Paging.POSITIONS, Paging.BLOCKS)
STEPS = 6  # consecutive steps that are timed together, after one that is not timed
LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_MS = 2, 15, 100.0  # rounds over all lengths, as many as fit in the time
CONTEXTS = 256, 16384  # positions of a slot: a short and a long context, if the runtime's context allows
TEMPERATURE_TIMED = 0.7
FORMAT = 3  # of the file

logger = logging.getLogger("lowlat")


class StepRunner(Protocol):
    """The part of an executor's interface that timing uses."""

    name: str
    device: torch.device
    state: BufferSet

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write buffers of the state by name, of every rank."""

    def step(self, bucket: Bucket) -> None:
        """Start one step."""

    def synchronize(self) -> None:
        """Wait until all that was started is done."""

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket."""

    def scratch(self, bucket: Bucket) -> BufferSet:
        """The scratch buffers of a bucket."""


class Mark(Protocol):
    """A point in the executor's stream."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds between this and a later one, both of which the device has passed."""


class CapturedSteps(StepRunner, Protocol):
    """A step runner whose steps are captured."""

    def mark(self) -> Mark:
        """Put a point after all that was started."""

    def forget(self) -> None:
        """Let the state be as if no step had run."""


def set_costs(
    executor: StepRunner,
    ladder: StepLadder,
    geometry: StepGeometry,
    programs: Mapping[Bucket, Program],
    weights: Mapping[str, torch.Tensor],
    *,
    fuse: bool,
    read_gb_s: float,
) -> Costs:
    """Give the device the costs by which it chooses lengths: times where steps are captured, else bytes of weights.

    weights    by canonical name; their content is not read
    read_gb_s  the GPU's bandwidth, by which bytes of experts take times
    Returns these costs.
    """
    num_waiting, experts = geometry.most_waiting, _experts_of(geometry)
    if executor.name == "graph":
        steps, per_expert = cast(CapturedSteps, executor), 0.0
        if experts is not None:
            shard = geometry.config.shard
            own = expert_bytes(programs[bodies_of(ladder.buckets[0])[0]], weights, experts)
            per_expert = own / (1 if shard is None else shard.size) / read_gb_s / 1e6
        costs: Costs = _kept_times(steps, ladder.buckets, num_waiting, per_expert, _facts(executor, geometry, fuse))
    else:
        costs = {bucket: by_bytes(programs, bucket, weights, experts) for bucket in ladder.buckets}
    write_costs(executor, costs, num_waiting)
    return costs


def _experts_of(geometry: StepGeometry) -> ExpertsSpec | None:
    """The experts that all MoE layers of the target have; None where there are none, or layers differ."""
    found = {layer.experts for layer in geometry.config.layers if layer.experts is not None}
    return found.pop() if len(found) == 1 else None


def write_costs(executor: StepRunner, costs: Costs, num_waiting: int) -> None:
    """Give the device costs of all buckets, after what was started before; see `cost_table`."""
    shape, context = executor.state["draft_length_costs"].shape, executor.state["tokens"].shape[1]
    table = cost_table(shape, costs, context, num_waiting)
    table = table.pin_memory() if executor.device.type == "cuda" else table  # so that the copy waits for no step
    executor.write_state({"draft_length_costs": table})


def _facts(executor: StepRunner, geometry: StepGeometry, fuse: bool) -> dict[str, Any]:
    """All that times of steps depend on."""
    from lowlat.kernels.toolchain.digests import source_digest  # the compiler's imports are for machines with a GPU

    properties: Any = torch.cuda.get_device_properties(executor.device)
    speculator = geometry.speculator
    return {
        "card": str(properties.name),
        "torch": torch.__version__,
        "version": installed_version(),
        "target": repr(geometry.config),
        "draft_model": None if speculator is None else [repr(speculator.draft_config), speculator.report()],
        "sizes": [geometry.max_batch, geometry.max_context, geometry.max_rows, geometry.block_size],
        "fuse": fuse,
        "kernels": source_digest(),
    }


def by_time(
    executor: CapturedSteps, buckets: Sequence[Bucket], num_waiting: int, per_expert: float = 0.0
) -> dict[Bucket, StepCosts]:
    """Milliseconds of each body of each bucket, in the order of the choice; the state is zero when it returns.

    num_waiting  positions that may wait for the draft model; 0: nothing waits
    per_expert   milliseconds that an expert more takes, in every layer; 0.0: there are none to choose
    Nothing may be under way. Raises DeviceError where the device fails.
    """
    even = {bucket: StepCosts([1.0] * len(bodies_of(bucket)), [0.0] * len(bodies_of(bucket))) for bucket in buckets}
    write_costs(executor, even, 0)
    most = executor.state["tokens"].shape[1] - (STEPS + 1) * executor.state["drafts"].shape[1]
    near, far = (max(1, min(context, most)) for context in CONTEXTS)
    found = {}
    for bucket in buckets:
        times = [_times_of(executor, bucket, context, num_waiting) for context in dict.fromkeys((near, far))]
        costs = StepCosts.between(times[0], times[-1], (bucket.batch * near, bucket.batch * far))
        if per_expert:
            costs = replace(costs, experts=_experts_in(executor, bucket, near), per_expert=per_expert)
        found[bucket] = costs
    executor.synchronize()
    executor.forget()
    executor.state["length_bounds"].zero_()
    return found


def _times_of(executor: CapturedSteps, bucket: Bucket, context: int, num_waiting: int) -> list[float]:
    """The times of a bucket's bodies after so many positions of each slot."""
    most = bucket.num_speculative_tokens
    slots = {name: values.to(executor.device) for name, values in _slots(executor.state, bucket.batch, context).items()}
    # at length zero a position more waits after every step: the draft model runs in none of them, or in the second
    waiting = dict.fromkeys(range(most + 1), 1) | {0: -STEPS}
    if num_waiting:
        waiting[most + 1] = num_waiting - 1
    rounds: list[list[float]] = []
    spent = 0.0
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and spent < ROUNDS_MS):
        rounds.append([])
        for body, count in waiting.items():
            executor.state["length_bounds"].fill_(body if body <= most else 0)
            rounds[-1].append(_time_of(executor, bucket, {**slots, "extended": slots["lengths"] - 1 - count}))
        spent += sum(rounds[-1]) * (STEPS + 1)
    times = [median(each) for each in zip(*rounds, strict=True)]
    alone = STEPS * (times[most + 1] - times[0]) if num_waiting else 0.0  # in one step of them
    return [*times[: most + 1], times[0] + max(alone, 0.0)]


def _experts_in(executor: CapturedSteps, bucket: Bucket, context: int) -> list[float]:
    """The experts that the rows of a bucket's bodies choose, a layer, after so many positions of each slot."""
    slots = {name: values.to(executor.device) for name, values in _slots(executor.state, bucket.batch, context).items()}
    counts = []
    for length, body in enumerate(bodies_of(bucket)[:-1]):
        executor.state["length_bounds"].fill_(length)
        executor.write_state({**slots, "extended": slots["lengths"] - 2})
        executor.step(bucket)
        executor.synchronize()
        counts.append(distinct_experts(executor.program(body), executor.scratch(body)))
    return [*counts, counts[0]]


def _time_of(executor: CapturedSteps, bucket: Bucket, slots: Mapping[str, torch.Tensor]) -> float:
    """The mean time of a few steps in a row, of slots in this state at first."""
    executor.write_state(slots)
    executor.step(bucket)  # while it runs, the host gets ahead
    begun = executor.mark()
    for _ in range(STEPS):
        executor.step(bucket)
    ended = executor.mark()
    executor.synchronize()  # bounds are the host's: the next ones must not come before
    return begun.elapsed_time(ended) / STEPS


def _slots(state: BufferSet, batch: int, length: int) -> dict[str, torch.Tensor]:
    """State of so many active slots amid their texts."""
    max_batch, max_context = state["tokens"].shape
    generator = torch.Generator().manual_seed(0)
    vocabulary, blocks = state["prompt_seen"].shape[1], max(_num_blocks(state) - 1, 1)
    table = torch.arange(state["block_table"].numel(), dtype=torch.int32).view(max_batch, -1) % blocks + 1
    ints = torch.zeros(max_batch, NUM_INTS, dtype=torch.int64)
    ints[:, MAX_LENGTH], ints[:, DRAFT_LIMIT], ints[:, NUM_LOGPROBS] = max_context, state["drafts"].shape[1], -1
    floats = torch.zeros(state["slot_floats"].shape)
    floats[:, REPETITION], floats[:, TOP_P], floats[:, TEMPERATURE] = 1.0, 1.0, TEMPERATURE_TIMED
    return {
        "tokens": torch.randint(vocabulary, (max_batch, max_context), generator=generator).int(),
        "active": (torch.arange(max_batch) < batch).int(),
        "lengths": torch.full((max_batch,), length, dtype=torch.int32),
        **{name: table for name in state if name.startswith("block_table")},
        **(
            {"state_lens": torch.full((max_batch,), max(length - 2, 0), dtype=torch.int32)}
            if "state_lens" in state
            else {}
        ),
        "slot_ints": ints,
        "slot_floats": floats,
        "stop_ids": torch.full(state["stop_ids"].shape, -1, dtype=torch.int32),
        "bias_ids": torch.full(state["bias_ids"].shape, -1, dtype=torch.int32),
    }


def _num_blocks(state: BufferSet) -> int:
    return min((spec.shape[0] for spec in state.specs.values() if spec.paging in PAGED), default=1)


def _kept_times(
    executor: CapturedSteps, buckets: Sequence[Bucket], num_waiting: int, per_expert: float, facts: Mapping[str, Any]
) -> Costs:
    """The times of these buckets' bodies: those in the user's cache for the same facts, or measured and put there.

    facts  of the GPU, the models and the sizes, as JSON values; whatever times depend on
    A file that cannot be read is measured again, a cache that cannot be written is one warning.
    """
    text = json.dumps({**facts, "format": FORMAT, "buckets": [str(bucket) for bucket in buckets]}, sort_keys=True)
    path = cache_directory() / "widths" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    known = _read(path, text, buckets)
    if known is not None:
        return known
    found = by_time(executor, buckets, num_waiting, per_expert)
    _write(path, {"facts": text, "times_ms": {str(bucket): asdict(times) for bucket, times in found.items()}})
    return found


def _read(path: Path, facts: str, buckets: Sequence[Bucket]) -> dict[Bucket, StepCosts] | None:
    """Times in a file; None where it holds none of these facts."""
    try:
        values = json.loads(path.read_text())
        if values["facts"] != facts:
            return None
        found = {bucket: _costs_of(values["times_ms"][str(bucket)]) for bucket in buckets}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if all(_fits(costs, bucket) for bucket, costs in found.items()) else None


def _costs_of(values: Mapping[str, Any]) -> StepCosts:
    base, slopes, experts = ([float(each) for each in values[name]] for name in ("base", "per_position", "experts"))
    return StepCosts(base, slopes, experts, float(values["per_expert"]))


def _fits(costs: StepCosts, bucket: Bucket) -> bool:
    """Whether costs that were read may be a bucket's."""
    count, experts = len(bodies_of(bucket)), costs.experts
    return (
        len(costs.base) == len(costs.per_position) == count
        and min(costs.base) >= 0.0
        and max(costs.base) > 0.0
        and min(costs.per_position) >= 0.0
        and costs.per_expert >= 0.0
        and (len(experts) == count and min(experts) > 0.0 if costs.per_expert else not experts)
    )


def _write(path: Path, values: Mapping[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text(json.dumps(values))
        part.replace(path)
    except OSError as error:
        logger.warning("times of steps by draft length cannot be kept in %s: %s", path.parent, error)
