"""This module has the step of a benchmark: one bucket's graph, on one GPU or several, in the middle of a long context.

Weights, keys and values are random, and so are recurrent states. Acceptance is imposed if the shapes say so. Without a
GPU the reference executor runs the same programs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from bench.lib.case import Case
from bench.lib.clock import LEAD, time_replays
from bench.lib.model import bucket_of
from lowlat.checkpoint.source import WeightSource
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.distributed.parallel import ParallelExecutor
from lowlat.executors.graph import GraphExecutor
from lowlat.executors.make import Rank, make_executor
from lowlat.graphs import BufferSet, Paging
from lowlat.graphs.program import Op, Program
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, MAX_LENGTH, NUM_LOGPROBS, REPETITION, TOP_P
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry
from lowlat.tools.profile.recording import LEAD as PROFILED_LEAD
from lowlat.tools.profile.recording import record_kernels
from lowlat.tools.profile.report import Summary, summarise
from lowlat.tools.profile.sites import call_sites
from lowlat.tools.profile.times import CallSite, attribute

__all__ = ["Step", "devices_of", "executor_of", "show_kernels"]

LENGTHS = {"lengths": 0, "checked_lengths": 0, "state_lens": -2}  # of states the row before the root is pending
SHOWN = 16  # kernels of a profile


def devices_of(device: torch.device, size: int) -> list[torch.device]:
    """Return `size` devices; of GPUs the first ones."""
    return (
        [device] if size == 1 else [torch.device("cuda", n) if device.type == "cuda" else device for n in range(size)]
    )


def executor_of(
    ranks: Sequence[StepGeometry], case: Case, weights: WeightSource, devices: Sequence[torch.device], drafted: Topology
) -> Any:
    """The executor of a case's programs, each rank's by its own shapes; it captures graphs where there are GPUs."""
    bucket = bucket_of(case, drafted)
    made = [Rank(each.config, {bucket: build_step(each, bucket, drafted)}, build_prefills(each)) for each in ranks]
    kind = "graph" if devices[0].type == "cuda" else "reference"
    return make_executor(DeviceChoice(devices[0], kind, "a benchmark"), made, weights, devices=devices)


class Step:
    """One bucket's step with every slot active at the case's context; `close` releases graphs and memory.

    shapes   of the runtime's programs
    drafted  what the step drafts; None: a chain of the case's draft length
    ranks    the shapes of each of several devices; (): there is one
    """

    def __init__(
        self,
        shapes: StepGeometry,
        case: Case,
        weights: WeightSource,
        devices: Sequence[torch.device] | torch.device,
        drafted: Topology | None = None,
        ranks: Sequence[StepGeometry] = (),
    ) -> None:
        self.case, self.shapes = case, shapes
        drafted = drafted or TreeTopology.chain(case.num_speculative_tokens)
        self.bucket = bucket_of(case, drafted)
        places = [devices] if isinstance(devices, torch.device) else devices
        self._parts = ranks or (shapes,)
        self.executor: GraphExecutor = cast(GraphExecutor, executor_of(self._parts, case, weights, places, drafted))
        is_one_gpu = places[0].type == "cuda" and len(self._parts) == 1
        self.num_launches = self.executor.num_kernels(self.bucket) if is_one_gpu else 0
        self._is_one_gpu = is_one_gpu
        if ranks:
            torch.manual_seed(0)
        for state in self._states():
            fill_state(state, shapes, case)
        self._wait()
        for _ in range(2):  # the first step has no drafts yet
            self.executor.step(self.bucket)
        self.executor.synchronize()

    @property
    def ranks(self) -> list[Any]:
        """The executor of each rank that has one of its own."""
        executor: Any = self.executor
        return list(executor.ranks) if isinstance(executor, ParallelExecutor) else [executor]

    @property
    def program(self) -> Program:
        """The step's program, of several GPUs the first one's."""
        return self.executor.program(self.bucket)

    def _states(self) -> list[BufferSet]:
        peers = getattr(self.executor, "peer_state", None)
        if peers is not None:
            return [peers(rank) for rank in range(len(self._parts))]
        return [rank.state for rank in self.ranks]

    def _wait(self) -> None:
        """Wait for all work on all devices: replays may be under way on another stream."""
        for device in {rank.device for rank in self.ranks if rank.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def replay(self) -> None:
        """Launch one step: of one GPU on torch's current stream, of several as a runtime does."""
        if self._is_one_gpu:
            self.executor.graph(self.bucket).launch(self.executor.launcher.stream())
        else:
            self.executor.step(self.bucket)

    def reset(self) -> None:
        """Reset the length of each slot on each rank to the case's context."""
        if len(self._parts) > 1:
            self.executor.synchronize()
        for state in self._states():
            start_slots(state, self.case)
        if len(self._parts) > 1:
            self._wait()

    def times(self, count: int) -> list[float]:
        """Milliseconds of so many steps, started as a runtime starts them, on the first device's stream."""
        self.reset()
        executor, device = self.ranks[0], self.executor.device
        if device.type != "cuda":
            return time_replays(self.replay, count, device, LEAD)
        self._wait()
        with torch.cuda.device(device), torch.cuda.stream(executor.stream):
            found = time_replays(lambda: self.executor.step(self.bucket), count, device, LEAD)
        self.executor.synchronize()
        return found

    def distinct_experts(self) -> list[int]:
        """The experts that the rows of each layer chose in one step, which is run operation by operation; a shared one
        is left out.

        [] without an MoE layer. Of one device.
        """
        if self.shapes.config.experts is None:
            return []
        return self._launched_experts() if self._is_one_gpu else self._referred_experts()

    def _launched_experts(self) -> list[int]:
        executor, counts, scratch = self.executor, list[int](), self.executor.scratch(self.bucket)
        self._wait()
        with torch.cuda.stream(executor.stream):
            stream = executor.launcher.stream()
            for group, launches in executor.prepare(self.bucket):
                for launch in launches:
                    launch.issue(stream)
                for op in group.ops:
                    if op.kind == "router":
                        executor.stream.synchronize()
                        counts.append(self._distinct(scratch[op.writes["expert_ids"]]))
            executor.stream.synchronize()
        return counts

    def _referred_experts(self) -> list[int]:
        counts: list[int] = []

        def count(op: Op, arguments: Mapping[str, Any]) -> None:
            if op.kind == "router":
                counts.append(self._distinct(arguments["expert_ids"]))

        executor: Any = self.executor
        executor.set_hook(count)
        try:
            self.executor.step(self.bucket)
        finally:
            executor.set_hook(None)
        return counts

    def _distinct(self, ids: torch.Tensor) -> int:
        experts = self.shapes.config.experts
        return sum(0 <= each < experts.num_experts for each in set(ids.flatten().tolist())) if experts else 0

    def sites(self, num_experts: float = 0.0) -> Sequence[CallSite]:
        """The first device's launches of a step at the case's context, with the bytes that each must read.

        num_experts  distinct experts that a layer's rows choose, a shared one included
        """
        lengths, rank = [self.case.context] * self.case.batch, self.ranks[0]
        return call_sites(rank.groups(self.bucket), rank.state, [lengths], num_experts)

    def profile(self, num_steps: int, wall_gb_per_s: float, num_experts: float = 0.0) -> Summary:
        """Record steps on the first device and summarise them by kernel; num_experts: see `sites`."""
        self.reset()

        def run() -> None:
            for _ in range(PROFILED_LEAD + num_steps):
                self.replay()
            if len(self._parts) > 1:
                self.executor.synchronize()

        (events,) = record_kernels(run, [self.ranks[0].device])
        return summarise(attribute(events, self.sites(num_experts), skip=PROFILED_LEAD), wall_gb_per_s)

    def close(self) -> None:
        """Release graphs and memory of all devices."""
        self.executor.close()


def fill_state(state: BufferSet, shapes: StepGeometry, case: Case, seed: int = 0) -> None:
    """Put every slot into the middle of a request at the case's context, with random tokens, blocks, keys and values.

    Tokens and blocks follow from the seed, whatever the device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, spec in state.specs.items():
        if spec.paging is Paging.POSITIONS:
            if state[name].is_floating_point():
                state[name].normal_()
            else:
                state[name].random_(0, 127)  # codes that are numbers
        elif name.startswith("delta_pending_g."):
            state[name].uniform_(0.9, 1.0)
        elif name.startswith(("conv_state.", "delta_")):
            state[name].normal_(0.0, 0.1)
    width = state["block_table"].shape[1]
    blocks = 1 + torch.randperm(shapes.num_blocks - 1, generator=generator)[: case.batch * width]
    for name in state:
        if name.startswith("block_table"):  # of layers of windows, too: their pools are as large
            state[name].copy_(blocks.view(case.batch, width))
    tokens = state["tokens"]
    tokens.copy_(torch.randint(shapes.config.vocab_size, tuple(tokens.shape), generator=generator))
    state["slot_ints"].zero_()
    state["slot_ints"][:, MAX_LENGTH] = shapes.max_context
    state["slot_ints"][:, DRAFT_LIMIT] = shapes.max_rows - 1
    state["slot_ints"][:, NUM_LOGPROBS] = -1
    state["slot_floats"].zero_()
    state["slot_floats"][:, TOP_P] = 1.0
    state["slot_floats"][:, REPETITION] = 1.0
    state["stop_ids"].fill_(-1)
    state["bias_ids"].fill_(-1)
    if shapes.checks is not None:
        state["staged_table"].copy_(state["block_table"])
    start_slots(state, case)


def start_slots(state: Mapping[str, torch.Tensor], case: Case) -> None:
    """Put every slot's length to the case's context, and let it decode; drafts and states stay as they are."""
    for name, more in LENGTHS.items():
        if name in state:
            state[name].fill_(case.context + more)
    state["active"].fill_(1)


def show_kernels(title: str, summary: Summary, count: int = SHOWN) -> None:
    """Print the kernels that take most of a step, all launches of each together."""
    print(f"{title}: {summary.step_us:.1f} us a step, {summary.num_launches} launches, idle {summary.idle.share:.1%}")
    for row in summary.kernels[:count]:
        rate = "" if row.share_of_wall is None else f"{row.share_of_wall:7.1%} of the wall"
        each = row.time_us / row.num_launches
        print(f"{row.time_us:9.1f} us {row.share:6.1%} {row.num_launches:4d} x {each:7.2f} us  {row.kernel}  {rate}")
