"""The costs of steps by their width, for the choice of it: times of captured steps, or bytes of weights.

Times are measured at load, on active slots of random tokens at a usual context, and kept in the user's cache: for the
same card, models and sizes they are read there.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Protocol, cast

import torch

from lowlat.graphs import Bucket, BucketLadder, BufferSet
from lowlat.kernels.reference.step.slot_record import (
    DRAFT_LIMIT,
    MAX_LENGTH,
    NUM_INTS,
    NUM_LOGPROBS,
    REPETITION,
    TOP_P,
)
from lowlat.models.program import Program
from lowlat.options.directories import cache_directory
from lowlat.step.state import StepGeometry, waiting_boundaries
from lowlat.step.width_costs import Costs, by_bytes, cost_table

__all__ = ["by_time", "set_costs"]

REPLAYS, WARM = 9, 3  # of each width
CONTEXT = 2048  # positions of a slot while widths are timed, if the runtime has as many
FORMAT = 1  # of the file

logger = logging.getLogger("lowlat")


class StepTimer(Protocol):
    """The part of an executor that steps are timed with."""

    name: str
    device: torch.device
    state: BufferSet

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write buffers of the state by name, of every rank."""

    def step(self, bucket: Bucket) -> None:
        """Start one step."""

    def synchronize(self) -> None:
        """Wait until all that was started is done."""


class CapturedSteps(StepTimer, Protocol):
    """A step timer whose steps are captured.

    stream  on which steps run, of several ranks the first one's
    """

    stream: Any

    def forget(self) -> None:
        """Let the state be as if no step had run."""


def set_costs(
    executor: StepTimer,
    ladder: BucketLadder,
    geometry: StepGeometry,
    programs: Mapping[Bucket, Program],
    weights: Mapping[str, torch.Tensor],
    *,
    fuse: bool,
) -> None:
    """Give the device the costs by which it chooses widths: times where steps are captured, else bytes of weights.

    weights  by canonical name; their content is not read
    """
    num_waiting = geometry.num_waiting if waiting_boundaries(geometry) else 0
    costs: Costs = {bucket: by_bytes(programs, bucket, weights) for bucket in ladder.buckets}
    if executor.name == "graph":
        costs = _kept_times(
            cast(CapturedSteps, executor), ladder.buckets, num_waiting, _facts(executor, geometry, fuse)
        )
    _write_costs(executor, costs, num_waiting)


def _write_costs(executor: StepTimer, costs: Costs, num_waiting: int) -> None:
    executor.write_state({"width_costs": cost_table(executor.state["width_costs"].shape, costs, num_waiting)})


def _facts(executor: StepTimer, geometry: StepGeometry, fuse: bool) -> dict[str, Any]:
    """All that times of steps depend on."""
    from lowlat.kernels.toolchain.digests import source_digest  # the compiler's imports are for machines with a card

    properties: Any = torch.cuda.get_device_properties(executor.device)
    speculator = geometry.speculator
    return {
        "card": str(properties.name),
        "torch": torch.__version__,
        "version": version("lowlat"),
        "target": repr(geometry.config),
        "draft_model": None if speculator is None else [repr(speculator.draft_config), speculator.report()],
        "sizes": [geometry.max_batch, geometry.max_context, geometry.max_rows, geometry.block_size],
        "fuse": fuse,
        "kernels": source_digest(),
    }


def by_time(executor: CapturedSteps, buckets: Sequence[Bucket], num_waiting: int) -> dict[Bucket, list[float]]:
    """Milliseconds of each body of each bucket, in the order of the choice; the state is zero when it returns.

    num_waiting  positions that may wait for the draft model; 0: nothing waits
    Nothing may be under way. Raises DeviceError where the device fails.
    """
    _write_costs(executor, {bucket: [1.0] * len(bucket.bodies) for bucket in buckets}, 0)
    with torch.cuda.stream(executor.stream):
        found = {bucket: _times_of(executor, bucket, num_waiting) for bucket in buckets}
        executor.synchronize()
        executor.forget()
        executor.state["width_bounds"].zero_()
    return found


def _times_of(executor: CapturedSteps, bucket: Bucket, num_waiting: int) -> list[float]:
    """The times of a bucket's bodies; what the draft model has left to run over makes the last one be chosen."""
    most = bucket.num_speculative_tokens
    times: list[float] = []
    for width in range(most + 2):
        extends = width > most
        if extends and not num_waiting:
            times.append(times[0])
            continue
        executor.state["width_bounds"].fill_(0 if extends else width)
        slots = _slots(executor.state, bucket.batch, num_waiting if extends else 1)
        events = []
        for _ in range(WARM + REPLAYS):
            executor.write_state(slots)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            executor.step(bucket)
            pair[1].record()
            events.append(pair)
        executor.synchronize()  # bounds are the host's: the next ones must not come before
        times.append(median(before.elapsed_time(after) for before, after in events[WARM:]))
    return times


def _slots(state: BufferSet, batch: int, num_waiting: int) -> dict[str, torch.Tensor]:
    """State of so many active slots amid their texts, of which the draft model has not run over the last positions."""
    max_batch, max_context = state["tokens"].shape
    length = min(CONTEXT, max_context - 2 * state["drafts"].shape[1])
    device, generator = state["tokens"].device, torch.Generator().manual_seed(0)
    vocabulary, blocks = state["prompt_seen"].shape[1], max(_num_blocks(state) - 1, 1)
    table = torch.arange(state["block_table"].numel(), dtype=torch.int32).view(max_batch, -1) % blocks + 1
    ints = torch.zeros(max_batch, NUM_INTS, dtype=torch.int64)
    ints[:, MAX_LENGTH], ints[:, DRAFT_LIMIT], ints[:, NUM_LOGPROBS] = max_context, state["drafts"].shape[1], -1
    floats = torch.zeros(state["slot_floats"].shape)
    floats[:, REPETITION], floats[:, TOP_P] = 1.0, 1.0
    lengths = torch.full((max_batch,), length, dtype=torch.int32)
    made = {
        "tokens": torch.randint(vocabulary, (max_batch, max_context), generator=generator).int(),
        "active": (torch.arange(max_batch) < batch).int(),
        "lengths": lengths,
        "extended": (lengths - 1 - num_waiting).clamp(min=0),
        "block_table": table,
        "slot_ints": ints,
        "slot_floats": floats,
        "stop_ids": torch.full(state["stop_ids"].shape, -1, dtype=torch.int32),
        "bias_ids": torch.full(state["bias_ids"].shape, -1, dtype=torch.int32),
    }
    return {name: values.to(device) for name, values in made.items()}


def _num_blocks(state: BufferSet) -> int:
    return min((spec.shape[0] for spec in state.specs.values() if spec.paging is not None), default=1)


def _kept_times(
    executor: CapturedSteps, buckets: Sequence[Bucket], num_waiting: int, facts: Mapping[str, Any]
) -> Costs:
    """The times of these buckets' bodies: those in the user's cache for the same facts, or measured and put there.

    facts  of the card, the models and the sizes, as JSON values; whatever times depend on
    A file that cannot be read is measured anew, a cache that cannot be written is one warning.
    """
    text = json.dumps({**facts, "format": FORMAT, "buckets": [str(bucket) for bucket in buckets]}, sort_keys=True)
    path = cache_directory() / "widths" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    known = _read(path, text, buckets)
    if known is not None:
        return known
    found = by_time(executor, buckets, num_waiting)
    _write(path, {"facts": text, "times_ms": {str(bucket): times for bucket, times in found.items()}})
    for bucket, times in found.items():
        logger.info("steps of %s take %s ms by width", bucket, ", ".join(f"{each:.3f}" for each in times))
    return found


def _read(path: Path, facts: str, buckets: Sequence[Bucket]) -> dict[Bucket, list[float]] | None:
    """Times in a file; None where it holds none of these facts."""
    try:
        values = json.loads(path.read_text())
        times = {bucket: [float(each) for each in values["times_ms"][str(bucket)]] for bucket in buckets}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    fits = all(len(each) == len(bucket.bodies) and min(each) > 0.0 for bucket, each in times.items())
    return times if fits and values.get("facts") == facts else None


def _write(path: Path, values: Mapping[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text(json.dumps(values))
        part.replace(path)
    except OSError as error:
        logger.warning("times of steps by width cannot be kept in %s: %s", path.parent, error)
