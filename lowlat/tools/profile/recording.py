"""This module records where a decode step's time goes on a GPU, and assigns kernels to stages.

It runs steps like a caller, through `Runtime.step`; torch's profiler (CUPTI) records the kernels inside a replayed
graph. `sites` knows the purpose of each launch, `times` and `report` do the arithmetic.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError, LowlatError
from lowlat.executors.devices import DeviceChoice, choose_device
from lowlat.graphs import Bucket
from lowlat.graphs.program import OWN_NAMES, RangeNames
from lowlat.options.request import SamplingParams
from lowlat.step.expert_counts import distinct_experts, routers_of
from lowlat.tools.profile.report import Summary, summarise
from lowlat.tools.profile.sites import call_sites
from lowlat.tools.profile.times import KernelEvent, StepTimes, attribute
from lowlat.tools.profile.wall import measure_wall

if TYPE_CHECKING:
    from lowlat.executors.kernel_executor import KernelExecutor

__all__ = [
    "LEAD",
    "GpuRow",
    "Profile",
    "Record",
    "Room",
    "choose_gpu",
    "chosen_experts",
    "find_room",
    "gpu_name",
    "gpu_wall",
    "own_kernels",
    "profile_steps",
    "random_prompts",
    "record_kernels",
    "start_decoding",
]

WARM_UP = 5  # steps before anything is timed
LEAD = 2  # recorded steps that do not count, because the profiler starts in them
OURS = ("lowlat", "kernels")  # parts of the names of all kernels of this package, mangled or not

Record = Callable[[Callable[[], None], Sequence[torch.device]], list[list[KernelEvent]]]
Update = Callable[[int, int], None]


@dataclass(frozen=True)
class Room:
    """The length of the prompts, and the tokens left for the steps."""

    prompt_length: int
    max_tokens: int

    @property
    def max_context(self) -> int:
        """Tokens of prompt and steps."""
        return self.prompt_length + self.max_tokens


@dataclass(frozen=True)
class GpuRow:
    """The recorded steps of one rank, on its GPU's own clock, us a step; see `Summary` and `AllReduceRow`."""

    device: str
    step_us: float
    all_reduce_us: float
    fused_us: float
    idle_share: float

    @classmethod
    def of(cls, device: torch.device, summary: Summary) -> "GpuRow":
        """Make a rank's row."""
        all_reduce = summary.all_reduce
        times = (0.0, 0.0) if all_reduce is None else (all_reduce.time_us, all_reduce.fused_us)
        return cls(str(device), summary.step_us, *times, summary.idle.share)


@dataclass(frozen=True)
class Profile:
    """A recording, with its conditions; with several ranks, steps and summary are those of the first.

    contexts  tokens of each request, in order of submission, at the first recorded step
    host_us   a step by the host's clock, without the profiler: the median of as many steps
    GPUs     of every rank; empty where there is one
    range_names  of stages, see `Program`
    """

    bucket: Bucket
    contexts: tuple[int, ...]
    host_us: float
    steps: tuple[StepTimes, ...]
    summary: Summary
    gpus: tuple[GpuRow, ...] = ()
    range_names: RangeNames = field(default_factory=lambda: OWN_NAMES)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, the single steps left out, and `cards` where there is one."""
        gpus = {"cards": [asdict(gpu) for gpu in self.gpus]} if self.gpus else {}
        return {
            "batch": self.bucket.batch,
            "rows": self.bucket.rows,
            "num_speculative_tokens": self.bucket.num_speculative_tokens,
            "contexts": list(self.contexts),
            "host_us": self.host_us,
            **self.summary.to_dict(),
            **gpus,
        }


def choose_gpu(device: str, executor: str) -> DeviceChoice:
    """Choose the GPU to profile on. Raises ConfigError if none can be used."""
    choice = choose_device(device, "auto" if device in ("auto", "cpu") else executor)
    if not choice.has_kernels:
        raise ConfigError(f"lowlat profile needs an NVIDIA GPU, and there is none to use: {choice.reason}")
    return choice


def gpu_wall(device: torch.device) -> float:
    """Measure the GPU's memory bandwidth, GB/s, and free the memory for it."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        wall = measure_wall(device)
    torch.cuda.empty_cache()
    return wall.gb_per_s


def find_room(
    context: int, max_position: int, *, batch: int, num_speculative_tokens: int, num_steps: int, prefill_chunk: int
) -> Room:
    """Find room for the steps after a context of this length; shorten the prompt near the model's last position.

    While one request prefills those before it decode, one token a step; one step may be run ahead of its caller.
    Raises ConfigError if there is no room.
    """
    waiting = 1 + batch * (1 + -(-context // prefill_chunk))
    steps = WARM_UP + num_steps + LEAD + num_steps + 1
    room = waiting + steps * (num_speculative_tokens + 1) + 1
    length = min(context, max_position - room)
    if length < 1:
        raise ConfigError(
            f"{num_steps} steps need room for {room} tokens and the model has {max_position} positions; "
            "take fewer steps or a shorter context"
        )
    return Room(length, room)


def random_prompts(vocab_size: int, batch: int, length: int, seed: int = 0) -> list[list[int]]:
    """Draw prompts of random tokens, all different, so that no request shares another's keys and values."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(vocab_size, (batch, length), generator=generator).tolist()
    return prompts


def start_decoding(
    runtime: Runtime, prompts: Sequence[Sequence[int]], max_tokens: int, progress: Update | None = None
) -> dict[str, int]:
    """Submit greedy requests of `max_tokens`, and step until all decode; returns their lengths by request.

    progress   called with steps done and steps needed
    Raises LowlatError for a request that ends before.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    lengths = {runtime.submit(prompt, params): len(prompt) for prompt in prompts}
    chunk = runtime.geometry.prefill_chunk
    needed = sum(1 + -(-length // chunk) for length in lengths.values())
    for done in range(needed):
        if runtime.scheduler.num_active == len(lengths):
            break
        _step(runtime, lengths, depth=0)
        if progress is not None:
            progress(done + 1, needed)
    if runtime.scheduler.num_active != len(lengths):
        raise LowlatError(f"{runtime.scheduler.num_active} of {len(lengths)} requests decode after {needed} steps")
    return lengths


def _step(runtime: Runtime, lengths: dict[str, int], depth: int | None = None) -> None:
    """Run one step, and add each request's new tokens to its length. Raises LowlatError if one ends."""
    for output in runtime.step(depth):
        if output.finish_reason is not None:
            raise LowlatError(f"{output.request_id} ended early ({output.finish_reason}): {output.error or 'no error'}")
        lengths[output.request_id] += len(output.token_ids)


def profile_steps(
    runtime: Runtime,
    lengths: dict[str, int],
    num_steps: int,
    wall_gb_per_s: float | None,
    record: Record | None = None,
) -> Profile:
    """Warm up, time `num_steps` steps by the host's clock, then record as many.

    lengths   of the requests that `start_decoding` brought to decoding; all of them decode on
    record    runs a function and returns the kernels that ran meanwhile; None: `record_kernels`
    Raises LowlatError if the recorded kernels are not those of whole steps.
    """
    bucket = runtime.scheduler.choose_bucket(runtime.num_speculative_tokens)
    chosen = []
    for _ in range(WARM_UP):
        _step(runtime, lengths)
        chosen.append(chosen_experts(runtime, bucket))
    durations = []
    for _ in range(num_steps):
        start = time.perf_counter()
        _step(runtime, lengths)
        durations.append(1e6 * (time.perf_counter() - start))
    seen: list[dict[str, int]] = []

    def run() -> None:
        for _ in range(LEAD + num_steps):
            seen.append(dict(lengths))
            _step(runtime, lengths)

    executor: Any = runtime.executor
    ranks: Sequence[KernelExecutor] = getattr(executor, "ranks", (executor,))
    recorded = (record or record_kernels)(run, [rank.device for rank in ranks])
    tokens = [list(each.values()) for each in seen[LEAD:]]
    steps, summaries, names = [], [], executor.program(bucket).range_names
    for rank, events in zip(ranks, recorded, strict=True):
        sites = call_sites(rank.groups(bucket), rank.state, tokens, fmean(chosen))
        steps.append(tuple(attribute(events, sites, skip=LEAD)))
        summaries.append(summarise(steps[-1], wall_gb_per_s, names))
    gpus = tuple(GpuRow.of(rank.device, each) for rank, each in zip(ranks, summaries, strict=True))
    conditions = bucket, tuple(seen[LEAD].values()), median(durations)
    return Profile(*conditions, steps[0], summaries[0], gpus if len(ranks) > 1 else (), names)


def record_kernels(run: Callable[[], None], devices: Sequence[torch.device]) -> list[list[KernelEvent]]:
    """Run a function; returns, by device, the kernels of this package that ran meanwhile."""
    from torch.profiler import ProfilerActivity, profile

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    wait()
    # acc_events: torch warns of profiles without it
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        wait()
    events = profiler.events() or ()
    return [own_kernels(events, device.index or 0) for device in devices]


def own_kernels(events: Sequence[Any], index: int) -> list[KernelEvent]:
    """Return this package's kernels among torch's events of one device, without copies and others' kernels."""
    return [
        KernelEvent(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and event.device_index == index and all(part in event.name for part in OURS)
    ]


def chosen_experts(runtime: Runtime, bucket: Bucket) -> float:
    """Return the mean number of distinct experts in a layer of the last step, with a shared one; 0.0 without experts.

    It waits for all steps under way.
    """
    program = runtime.executor.program(bucket)
    if not routers_of(program):
        return 0.0
    runtime.executor.synchronize()
    return distinct_experts(program, runtime.executor.scratch(bucket))


def gpu_name(device: torch.device) -> str:
    """Return the GPU's name."""
    return str(torch.cuda.get_device_name(device))
