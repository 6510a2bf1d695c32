"""The graph executor captures every program's launches into a CUDA graph at the start, and then replays these graphs.

With `device_loop` it also captures each bucket as a loop: a WHILE node whose body is the step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lowlat.errors import ConfigError, DeviceError
from lowlat.executors.kernel_executor import DEFAULT, KernelExecutor, KernelOptions, Size, abandon
from lowlat.graphs import Bucket, Role
from lowlat.graphs.audit import OwnedMemory
from lowlat.graphs.capture import Body, Choice, capture, capture_choice
from lowlat.graphs.launch import Launch
from lowlat.graphs.loop import LoopMemory, capture_loop
from lowlat.graphs.program import Program
from lowlat.graphs.replay import CapturedGraph, Replays
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.kernels.step.publish import LoopControl, for_condition
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.lowering.binding import Call, LibraryCall
from lowlat.lowering.lower import LoweredGroup
from lowlat.lowering.operations import RING_COUNT
from lowlat.step.variants import bodies_of, is_choice, may_repeat

__all__ = ["GraphExecutor", "check_call"]

NO_CONDITION = 0  # replaces a condition's handle, which exists only while its graph is captured


class GraphExecutor(KernelExecutor):
    """Captures every bucket, the largest first, and all of prefill; after that it allocates and compiles nothing.

    looping   whether to capture every bucket of steps as a loop, too; see `lowlat.executors.LoopingExecutor`
    progress  called with buckets captured and buckets in all
    Raises DeviceError for a capture that holds anything but the step's kernels, or an address without an owner.
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
        options: KernelOptions = DEFAULT,
        *,
        looping: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(programs, prefills, weights, device, options)
        place = options.place
        with torch.cuda.stream(self.stream):
            self._core_stream = self.launcher.stream()
            self._graphs: Replays[Size] = Replays(self._core_stream)
            self._loops: Replays[Bucket] = Replays(self._core_stream)
            self._loop_memory = LoopMemory(device, None if place is None else place.peers.stop_flag)
            chosen = {body for bucket in programs for body in bodies_of(bucket)}  # captured with it
            captured = [bucket for bucket in programs if bucket not in chosen]
            repeated = [bucket for bucket in programs if looping and may_repeat(bucket)]
            bodies = {bucket: self._lower(bucket, self._control()) for bucket in repeated}
            self.launcher.compile_ahead(call for groups in bodies.values() for call in _calls(groups))
            self._check_addresses([*self._groups.values(), *bodies.values()])
            self._pool = torch.cuda.MemPool()  # memory of library operations; it must live as long as the graphs
            self._run_once(prefills)
            for number, bucket in enumerate(captured):
                self._graphs[bucket] = self._capture(bucket)
                if bucket in bodies:
                    self._loops[bucket] = self._capture_loop(bucket, bodies)
                if progress is not None:
                    progress(number + 1, len(captured))
            for size in sorted(prefills, reverse=True):
                self._graphs[size] = self._capture(size)
        self._synchronize()

    def _control(self) -> LoopControl:
        memory = self._loop_memory
        stop_flag = memory.stop_flag if self._place is None else self._place.stop_flag
        return LoopControl(NO_CONDITION, self.state["active"], memory.budget, stop_flag)

    def _run_once(self, sizes: Iterable[int]) -> None:
        """Run prefill over dead rows, so that libraries are loaded and have allocated their memory in the pool."""
        with self._failures(), torch.cuda.use_mem_pool(self._pool):
            for size in sorted(sizes, reverse=True):
                for _, launches in self.prepare(size):
                    for launch in launches:
                        launch.issue(self._core_stream)

    def _capture(self, size: Size) -> CapturedGraph:
        if isinstance(size, Bucket) and is_choice(size):
            return capture_choice(self._core_stream, self._choice(size, self._groups))
        launches = [launch for _, launches in self.prepare(size) for launch in launches]
        with torch.cuda.use_mem_pool(self._pool):
            return capture(self._core_stream, launches)

    def _choice(self, bucket: Bucket, groups: Mapping[Any, Sequence[LoweredGroup]]) -> Choice:
        """The opening of a bucket, and its bodies."""
        return Choice(self._part(groups[bucket]), [self._part(groups[each]) for each in bodies_of(bucket)])

    def _capture_loop(self, bucket: Bucket, bodies: Mapping[Bucket, Sequence[LoweredGroup]]) -> CapturedGraph:
        if is_choice(bucket):
            return capture_loop(self._core_stream, self._choice(bucket, bodies))
        return capture_loop(self._core_stream, self._part(bodies[bucket]))

    def _part(self, groups: Sequence[LoweredGroup]) -> Body:
        """The launches of a program, lowered and compiled before capture, which would record copies of lowering."""
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
        owned = OwnedMemory([*self.owned(), *self._loop_memory.tensors])
        for groups in bodies:
            for call in _calls(groups):
                check_call(owned, call)

    def _run(self, size: Size) -> None:
        self._launch(self._graphs, size)

    def _launch(self, replays: Replays[Any], key: Size) -> None:
        """Replay on the executor's stream. Raises DeviceError, which names the device, if it has failed."""
        try:
            replays.launch(key)
        except DeviceError as error:
            self._failed = True
            raise DeviceError(f"the device {self.device} failed: {error}") from error

    def start_loop(self, bucket: Bucket, budget: int) -> None:
        """Start at most `budget` steps on the device, after all started work.

        Raises ConfigError if no loops were captured.
        """
        if bucket not in self._loops or budget < 1:
            raise ConfigError(f"no loop of {budget} steps can be started for {bucket}; see device_loop")
        with torch.cuda.stream(self.stream):
            self._loop_memory.begin(budget)
        self._launch(self._loops, bucket)

    def stop_loop(self) -> None:
        """Ask all loops to end; returns at once."""
        self._loop_memory.stop()

    def wait_loop(self, count: int) -> bool:
        """Return True when `count` steps have been published, False when all loops have ended before.

        Raises DeviceError when the device has failed, or hangs in a step.
        """
        return self._await_ring(count, self._loop_memory.stopping)

    def mark(self) -> torch.cuda.Event:
        """An event in the stream after all started work, for timing."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def forget(self) -> None:
        """Wait for all steps, then zero the state and publications that they wrote: for steps that were only timed."""
        with torch.cuda.stream(self.stream):
            self._synchronize()
            for name, spec in self.state.specs.items():
                if spec.role in (Role.STATE, Role.PUBLICATION):
                    self.state[name].zero_()
            self.workspace(RING_COUNT, (1,), torch.int64).zero_()
            self._synchronize()

    def graph(self, size: Size) -> CapturedGraph:
        """The graph of a bucket, or of prefill by number of positions."""
        return self._graphs[size]

    def loop(self, bucket: Bucket) -> CapturedGraph:
        """The graph of a bucket's loop. Raises KeyError if none was captured."""
        return self._loops[bucket]

    def num_kernels(self, bucket: Bucket) -> int:
        """Kernel nodes of a bucket's graph."""
        return self._graphs[bucket].num_kernels

    def close(self) -> None:
        """Stop a loop, release the graphs, then buffers and weights. On a failed device this does not wait."""
        self.stop_loop()
        if not self._failed:
            self._synchronize()
            self._graphs.close()
            self._loops.close()
        if self._failed:  # to destroy a graph, the driver would wait for its hanging loop
            abandon([self._pool, self._loop_memory, *self._graphs.abandon(), *self._loops.abandon()])
        del self._pool, self._loop_memory
        super().close()


def _calls(groups: Sequence[LoweredGroup]) -> Iterator[Call]:
    return (call for group in groups for call in group.calls)


def check_call(owned: OwnedMemory, call: Call) -> None:
    """Raise DeviceError for a call that points into memory without an owner."""
    if isinstance(call, LibraryCall):
        owned.check(call.name, call.tensors)
    else:
        owned.check(call.kernel.name, call.arguments)
