"""The steps of `bench.draft_passes`: a method's at all depths, the launches of their draft passes, and their bytes."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch

from bench.clock import Timed, round_robin
from bench.dense_cases import Case
from bench.draft_passes_result import PassBytes
from bench.lowlat_step import fill_state
from lowlat.errors import LowlatError
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.graph import GraphExecutor
from lowlat.executors.make import make_executor
from lowlat.graphs import Bucket
from lowlat.graphs.capture import CapturedGraph, capture
from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry
from lowlat.tools.bench.step_bytes import FEW_ROWS, part_sizes, program_bytes, weight_sizes
from lowlat.tools.profile.recording import LEAD, record_kernels
from lowlat.tools.profile.report import Summary, summarise
from lowlat.tools.profile.sites import call_sites
from lowlat.tools.profile.times import attribute

__all__ = ["PARTS", "PASS", "DraftingSteps", "pass_bytes"]

PASS = (
    Stage.DRAFT_FC,
    Stage.DRAFT_ATTENTION_FMHA,
    Stage.DRAFT_FFN,
    Stage.DRAFT_LM_HEAD,
)
PARTS = ("step", "rest", "alone")
PROFILED_STEPS = 10
CHOSEN = "draft_nodes"  # written by each choice of a draft
KEPT_TWICE = "head.context."  # rows of the layers' own matrices, which are counted there


def pass_bytes(program: Program, sizes: Mapping[str, int], lengths: Sequence[float]) -> PassBytes:
    """Bytes of the draft pass of a step, by its program.

    sizes    bytes of weights as operations name them
    lengths  committed tokens of each request
    """
    levels: dict[str, int] = {}  # how many choices of drafts each buffer's content waits for
    uses: dict[str, set[int]] = {}
    ops, appended = [op for op in program.ops if op.stage in PASS], 0
    for op in ops:
        level = max((levels.get(name, 0) for name in (*op.reads.values(), *op.updates)), default=0)
        for name in op.writes.values():
            levels[name] = max(levels.get(name, 0), level) + (name == CHOSEN)
        if op.kind not in FEW_ROWS:
            for name in op.weights.values():
                if not name.startswith(KEPT_TWICE):
                    uses.setdefault(name, set()).add(level)
        appended += _written(program, op) if op.kind == "kv_write" else 0
    counts = Counter({name: len(found) * sizes.get(name, 0) for name, found in uses.items()})
    lm_head = sum(count for name, count in counts.items() if "lm_head" in name)
    markov = sum(count for name, count in counts.items() if ".markov." in name)
    attention = replace(program, ops=tuple(op for op in ops if op.kind == "attention"))
    return PassBytes(
        layers=counts.total() - lm_head - markov,
        lm_head=lm_head,
        markov=markov,
        kv=program_bytes(attention, {}, lengths, 1.0),
        appended=appended,
        read=program_bytes(replace(program, ops=tuple(ops)), sizes, lengths, 1.0),
    )


def _written(program: Program, op: Op) -> int:
    """Bytes of keys and values that an operation writes."""
    size = program.buffers[op.writes["k_cache"]].dtype.itemsize
    return sum(prod(program.buffers[op.reads[name]].shape) for name in ("k", "v")) * size


class DraftingSteps:
    """One method's steps of all depths, every slot active at the same context; `close` releases them.

    weights  of target and draft model, canonical
    """

    def __init__(
        self,
        shapes: StepGeometry,
        context: int,
        depths: Sequence[int],
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._shapes, self._context, self._device = shapes, context, device
        self._buckets = {depth: Bucket(shapes.max_batch, depth + 1, depth) for depth in sorted(depths, reverse=True)}
        programs = {
            bucket: build_step(shapes, bucket, TreeTopology.chain(depth)) for depth, bucket in self._buckets.items()
        }
        size, prefill = max(build_prefills(shapes).items())
        choice = DeviceChoice(device, "graph" if device.type == "cuda" else "reference", "a benchmark")
        self._executor: Any = make_executor(choice, programs, {size: prefill}, weights)
        fill_state(self._executor.state, shapes, Case(shapes.max_batch, context, max(depths)))
        self._graphs: list[CapturedGraph] = []

    def bytes(self, depth: int) -> PassBytes:
        """The bytes of the draft pass at a depth."""
        config, speculator = self._shapes.config, self._shapes.speculator
        own = {} if speculator is None else part_sizes(speculator.weight_plan(config.dtype), config)
        lengths = [float(self._context)] * self._shapes.max_batch
        return pass_bytes(self._executor.program(self._buckets[depth]), weight_sizes(config) | own, lengths)

    def num_launches(self, depth: int) -> int | None:
        """Launches of the draft pass; None where no kernels run."""
        if self._device.type != "cuda":
            return None
        groups = self._executor.groups(self._buckets[depth])
        return sum(len(group.calls) for group in groups if group.stage in PASS)

    def measure(self, depth: int, replays: int, turn: int) -> dict[str, list[float]]:
        """Milliseconds of `replays` whole steps, of steps without the pass, and of the pass alone, by PARTS.

        Raises LowlatError where a request has ended meanwhile: its steps cost nothing.
        """
        self._reset()
        self._settle()
        for _ in range(2):  # the first step has no drafts of this depth yet
            self._executor.step(self._buckets[depth])
        self._executor.synchronize()
        if self._device.type != "cuda":
            times = self._by_operation(self._buckets[depth], replays)
        else:
            entries = [Timed(part, replay, self._reset) for part, replay in self._replays(depth).items()]
            round_robin(entries, replays, turn, self._device)
            times = {entry.name: entry.ms for entry in entries}
        self._settle()
        if not bool(self._executor.state["active"].all()):
            raise LowlatError(f"a request ended while steps of {depth} drafts were timed: its logits were not finite")
        return times

    def record(self, depth: int, wall_gb_per_s: float | None) -> Summary | None:
        """Some steps as a profiler records them, summed up; None where no kernels run.

        wall_gb_per_s  the card's bandwidth, which shares are of
        """
        if self._device.type != "cuda":
            return None
        executor, bucket = cast(GraphExecutor, self._executor), self._buckets[depth]
        replay = partial(self._launch, executor.graph(bucket))
        self._reset()

        def run() -> None:
            for _ in range(LEAD + PROFILED_STEPS):
                replay()

        (events,) = record_kernels(run, [executor.device])
        lengths = [self._context] * self._shapes.max_batch
        sites = call_sites(executor.groups(bucket), executor.state, [lengths])
        return summarise(attribute(events, sites, skip=LEAD), wall_gb_per_s)

    def close(self) -> None:
        """Release graphs, buffers and weights."""
        self._settle()
        for graph in self._graphs:
            graph.close()
        self._executor.close()

    def _reset(self) -> None:
        """Put every slot's length back to the context; drafts stay as they are."""
        self._executor.state["lengths"].fill_(self._context)
        self._executor.state["active"].fill_(1)

    def _settle(self) -> None:
        """Wait for all streams: steps are launched on the executor's, replays and resets on another."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _launch(self, graph: CapturedGraph) -> None:
        graph.launch(self._executor.launcher.stream())

    def _replays(self, depth: int) -> dict[str, Callable[[], None]]:
        executor = cast(GraphExecutor, self._executor)
        bucket = self._buckets[depth]
        graphs = {"step": executor.graph(bucket)}
        for part in PARTS[1:]:
            groups = [group for group in executor.groups(bucket) if (group.stage in PASS) == (part == "alone")]
            first, *others = [call for group in groups for call in group.calls]
            if isinstance(first, KernelCall):
                first = replace(first, dependent=False)  # in a graph of its own nothing is launched before it
            launches = [executor.launcher.prepare(call) for call in (first, *others)]
            with torch.cuda.stream(executor.stream):
                graphs[part] = capture(executor.launcher.stream(), launches)
            self._graphs.append(graphs[part])
        self._settle()
        return {part: partial(self._launch, graph) for part, graph in graphs.items()}

    def _by_operation(self, bucket: Bucket, replays: int) -> dict[str, list[float]]:
        """The same figures of the reference, whose operations run one after the other."""
        times: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(replays):
            self._reset()
            marks, stages = [time.perf_counter()], list[Stage]()

            def look(
                op: Op, _: Mapping[str, torch.Tensor], marks: list[float] = marks, stages: list[Stage] = stages
            ) -> None:
                marks.append(time.perf_counter())
                stages.append(op.stage)

            self._executor.set_hook(look)
            self._executor.step(bucket)
            self._executor.set_hook(None)
            lasted = [1e3 * (after - before) for before, after in pairwise(marks)]
            alone = sum(ms for ms, stage in zip(lasted, stages, strict=True) if stage in PASS)
            for part, value in zip(PARTS, (sum(lasted), sum(lasted) - alone, alone), strict=True):
                times[part].append(value)
        return times
