"""The graph executor: every program's launches captured into a CUDA graph at the start, replayed each time it runs.

Where it is asked to, it also captures each bucket as a loop: a WHILE node whose body is the step.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowlat.errors import ConfigError, DeviceError
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.distributed.watchdog import WATCHDOG
from lowlat.executors.kernel_executor import KernelExecutor, Size, abandon
from lowlat.graphs import Bucket, Role
from lowlat.graphs.capture import Body, CapturedGraph, Choice, capture, capture_choice, capture_loop
from lowlat.graphs.launch import Launch
from lowlat.graphs.program import Program
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.kernels.step.publish import LoopControl, for_condition
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.lowering.binding import Call, LibraryCall
from lowlat.lowering.lower import LoweredGroup
from lowlat.lowering.operations import RING_COUNT

__all__ = ["CaptureProgress", "GraphExecutor"]

CaptureProgress = Callable[[Bucket, int, int], None]
NO_CONDITION = 0  # stands for the handle of a condition that is made only while its graph is captured


class GraphExecutor(KernelExecutor):
    """Captures every bucket, the largest first, and all of prefill; then nothing is allocated or compiled any more.

    looping   capture every bucket of steps as a loop, too; see `lowlat.executors.LoopingExecutor`
    progress  called with the bucket just captured, buckets done and buckets in all
    Raises DeviceError for a capture that holds anything but the step's kernels, or an address that nobody owns.
    """

    name = "graph"
    asynchronous = True
    switches = True

    def __init__(
        self,
        programs: Mapping[Bucket, Program],
        prefills: Mapping[int, Program],
        weights: Mapping[str, torch.Tensor | PackedExperts],
        device: torch.device,
        *,
        looping: bool = False,
        fuse: bool = True,
        cache_directory: Path | None = None,
        progress: CaptureProgress | None = None,
        watchdog: tuple[float, float] = WATCHDOG,
        place: RankPlace | None = None,
    ) -> None:
        super().__init__(
            programs, prefills, weights, device, fuse=fuse, cache_directory=cache_directory, watchdog=watchdog,
            place=place,
        )  # fmt: skip
        self._graphs: dict[Size, CapturedGraph] = {}
        self._loops: dict[Bucket, CapturedGraph] = {}
        with torch.cuda.stream(self.stream):
            self._core_stream = self.launcher.stream()
            self._loop_budget = torch.zeros(1, dtype=torch.int64, device=device)
            shared = None if place is None else place.peers.stop_flag
            self._stop_flag = torch.zeros(1, dtype=torch.int64, pin_memory=True) if shared is None else shared
            chosen = {body for bucket in programs for body in bucket.bodies}  # captured with it
            captured = [bucket for bucket in programs if bucket not in chosen]
            repeated = [bucket for bucket in programs if looping and not bucket.prefilled and not bucket.verifies]
            bodies = {bucket: self._lower(bucket, self._control()) for bucket in repeated}
            self.launcher.compile_ahead(call for groups in bodies.values() for call in _calls(groups))
            self._check_addresses([*self._groups.values(), *bodies.values()])
            self._pool = torch.cuda.MemPool()  # of what a library's operations take: it must live as long as the graphs
            self._run_once(prefills)
            for number, bucket in enumerate(captured):
                self._graphs[bucket] = self._capture(bucket)
                if bucket in bodies:
                    self._loops[bucket] = self._capture_loop(bucket, bodies)
                if progress is not None:
                    progress(bucket, number + 1, len(captured))
            for size in sorted(prefills, reverse=True):
                self._graphs[size] = self._capture(size)
        self._stop = self._stop_flag.numpy()
        self._synchronize()

    def _control(self) -> LoopControl:
        stop_flag = self._stop_flag if self._place is None else self._place.stop_flag
        return LoopControl(NO_CONDITION, self.state["active"], self._loop_budget, stop_flag)

    def _run_once(self, sizes: Iterable[int]) -> None:
        """Run prefill over dead rows, so that libraries are loaded and the pool holds what they take."""
        with self._failures(), torch.cuda.use_mem_pool(self._pool):
            for size in sorted(sizes, reverse=True):
                for _, launches in self.prepare(size):
                    for launch in launches:
                        launch.issue(self._core_stream)

    def _capture(self, size: Size) -> CapturedGraph:
        if isinstance(size, Bucket) and size.chooses:
            return capture_choice(self._core_stream, self._choice(size, self._groups))
        launches = [launch for _, launches in self.prepare(size) for launch in launches]
        with torch.cuda.use_mem_pool(self._pool):
            return capture(self._core_stream, launches)

    def _choice(self, bucket: Bucket, groups: Mapping[Any, Sequence[LoweredGroup]]) -> Choice:
        """The opening of a bucket, and its bodies."""
        return Choice(self._part(groups[bucket]), [self._part(groups[each]) for each in bucket.bodies])

    def _capture_loop(self, bucket: Bucket, bodies: Mapping[Bucket, Sequence[LoweredGroup]]) -> CapturedGraph:
        if bucket.chooses:
            return capture_loop(self._core_stream, self._choice(bucket, bodies))
        return capture_loop(self._core_stream, self._part(bodies[bucket]))

    def _part(self, groups: Sequence[LoweredGroup]) -> Body:
        """Launches that were lowered and compiled before: lowering may copy, which a capture would record."""
        prepared: list[tuple[KernelCall, Launch]] = []
        for call in _calls(groups):
            if isinstance(call, LibraryCall):
                raise DeviceError(f"{call.name} calls a library, which cannot be part of what the device repeats")
            prepared.append((call, self.launcher.prepare(call)))

        def body(condition: int) -> Iterator[Launch]:
            for call, launch in prepared:
                bound = for_condition(call, condition)
                yield launch if bound is call else self.launcher.prepare(bound)

        return body

    def _check_addresses(self, bodies: Iterable[Sequence[LoweredGroup]]) -> None:
        owned = _Addresses([*self.owned(), self._loop_budget, self._stop_flag])
        for groups in bodies:
            for call in _calls(groups):
                owned.check(call)

    def _run(self, size: Size) -> None:
        self._launch(self._graphs[size])

    def _launch(self, graph: CapturedGraph) -> None:
        """Replay on the executor's stream. Raises DeviceError, which names the device, where it has failed."""
        try:
            graph.launch(self._core_stream)
        except DeviceError as error:
            self._failed = True
            raise DeviceError(f"the device {self.device} failed: {error}") from error

    def start_loop(self, bucket: Bucket, budget: int) -> None:
        """Start at most `budget` steps on the device, behind what was started before.

        Raises ConfigError where no loops were captured.
        """
        loop = self._loops.get(bucket)
        if loop is None or budget < 1:
            raise ConfigError(f"no loop of {budget} steps can be started for {bucket}; see device_loop")
        self._stop[0] = 0  # a loop that was told to stop has read it: its last step was seen
        with torch.cuda.stream(self.stream):
            self._loop_budget.fill_(budget)  # on the stream: the last loop writes its own after it has published
        self._launch(loop)

    def stop_loop(self) -> None:
        """Ask all loops to end; returns at once."""
        self._stop[0] = 1

    def wait_loop(self, count: int) -> bool:
        """Return True when `count` steps have been published, False when all loops have ended before.

        Raises DeviceError when the device has failed, or hangs in a step.
        """
        return self._await_ring(count, self._stop)

    def mark(self) -> torch.cuda.Event:
        """An event of the stream, behind all that was started, to time it by."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def forget(self) -> None:
        """Wait for all steps, then zero what they have written and published: for steps that were only timed."""
        with torch.cuda.stream(self.stream):
            self._synchronize()
            for name, spec in self.state.specs.items():
                if spec.role in (Role.STATE, Role.PUBLICATION):
                    self.state[name].zero_()
            self.workspace(RING_COUNT, (1,), torch.int64).zero_()
            self._synchronize()

    def graph(self, size: Size) -> CapturedGraph:
        """The graph of a bucket, or of prefill over so many positions."""
        return self._graphs[size]

    def loop(self, bucket: Bucket) -> CapturedGraph:
        """A bucket's loop. Raises KeyError where none was captured."""
        return self._loops[bucket]

    def num_kernels(self, bucket: Bucket) -> int:
        """Kernel nodes of a bucket's graph."""
        return self._graphs[bucket].num_kernels

    def close(self) -> None:
        """Stop a loop, release the graphs, then buffers and weights. A device that has failed is not waited for."""
        self.stop_loop()
        if not self._failed:
            self._synchronize()
            for graph in (*self._graphs.values(), *self._loops.values()):
                graph.close()
        if self._failed:  # the driver waits for a loop that hangs when it destroys its graph
            graphs = (*self._graphs.values(), *self._loops.values())
            abandon([self._pool, self._loop_budget, self._stop_flag, self._stop, *graphs])
        self._graphs.clear()
        self._loops.clear()
        del self._pool, self._loop_budget, self._stop_flag, self._stop
        super().close()


def _calls(groups: Sequence[LoweredGroup]) -> Iterator[Call]:
    return (call for group in groups for call in group.calls)


class _Addresses:
    """The memory that a captured graph may point into."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = ((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()) for tensor in tensors)
        self._starts: list[int] = []
        self._ends: list[int] = []  # ascending too: a span that lies within another is left out
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            if start < end and (not self._ends or end > self._ends[-1]):
                self._starts.append(start)
                self._ends.append(end)

    def check(self, call: Call) -> None:
        """Raise DeviceError for a call that points elsewhere."""
        arguments: Sequence[Any] = call.tensors if isinstance(call, LibraryCall) else call.arguments
        name = call.name if isinstance(call, LibraryCall) else call.kernel.name
        for number, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor) and argument.numel():
                start = argument.data_ptr()
                end = start + argument.numel() * argument.element_size()
                place = bisect_right(self._starts, start) - 1
                if place < 0 or end > self._ends[place]:
                    raise DeviceError(f"{name}: argument {number} lies in memory that nobody owns")
