"""This module times launches on a GPU in turns, so that all plans see the same clocks."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from statistics import median

import torch

from lowlat.errors import DeviceError
from lowlat.executors.kernel_executor import abandon
from lowlat.executors.launcher import Launcher
from lowlat.graphs.capture import capture
from lowlat.graphs.launch import Launch
from lowlat.graphs.replay import CapturedGraph
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall
from lowlat.tools.profile.wall import event_times
from lowlat.tools.tune.arguments import Places
from lowlat.tools.tune.cases import Case, cases_of
from lowlat.tools.tune.shapes import Shape

__all__ = ["GpuBench"]

logger = logging.getLogger("lowlat")
LEAST_LAUNCHES, MOST_LAUNCHES = 4, 32  # of a graph, but one for each place of the weights at least
GRAPH_US = 300.0  # a graph's time at least, where the memory is read at its peak
TURNS, REPLAYS = 5, 4  # of each plan; replays of a turn
LEAD = 2


class GpuBench:
    """Compiles and times the plans of launches on one CUDA device. It owns a stream."""

    def __init__(self, device: torch.device) -> None:
        self.launcher = Launcher(device)
        self.gpu: Gpu = self.launcher.gpu
        self._device, self._stream = device, torch.cuda.Stream(device)

    def compile(self, calls: Sequence[KernelCall]) -> None:
        """Compile what the cache lacks, on all cores."""
        self.launcher.compile_ahead(calls)

    def times_us(self, shape: Shape, plans: Sequence[Sequence[KernelCall]]) -> dict[str, list[float]]:
        """Microseconds of a launch under each plan, by case, the calls of its group included; infinite for a failure.

        A plan that does not load, or whose registers do not suffice, fails. Raises DeviceError where the device fails,
        and where a launch of one of several ranks has waited in vain for what it sent itself.
        """
        pair, found = shape.source[0], dict[str, list[float]]()
        places = Places(self._device, pair.weights.tensors(), pair.weight_bytes)
        num_places = places.num_copies(plans[0])
        try:
            with torch.cuda.stream(self._stream):
                for case in cases_of(shape.kind, places.place(plans[0], 0), num_places):
                    found[case.name] = self._times_of(shape, places, case, plans)
            self.launcher.clear()
            waited = pair.abort is not None and bool(places.read(pair.abort).any())
        except (RuntimeError, DeviceError) as error:  # torch's, of a device whose context is lost
            abandon([places])
            raise DeviceError(f"the device {self._device} failed: {error}") from error
        if waited:
            raise DeviceError(f"{shape.kind} {shape.key} waited in vain for numbers of other ranks: its times are void")
        return found

    def _times_of(self, shape: Shape, places: Places, case: Case, plans: Sequence[Sequence[KernelCall]]) -> list[float]:
        kept: list[tuple[KernelCall, ...]] = []  # launches know addresses alone; the calls own the memory
        with ExitStack() as stack:
            replays, counts = [], []
            for calls in plans:
                copies = max(case.copies, num_places := places.num_copies(calls))
                placed = [case.fill(places.place(calls, copy % num_places), copy) for copy in range(copies)]
                kept += placed
                graph, count = self._graph(shape, placed)
                replays.append(None if graph is None else self._replay(stack, graph))
                counts.append(count)
            times = _in_turns(replays)
            self._stream.synchronize()
        return [math.inf if each is None else 1e3 * each / count for each, count in zip(times, counts, strict=True)]

    def _graph(self, shape: Shape, placed: Sequence[tuple[KernelCall, ...]]) -> tuple[CapturedGraph | None, int]:
        moved = max(_num_bytes(call) for call in placed[0])
        wanted = round(GRAPH_US * 1e3 * self.gpu.read_gb_s / moved)
        count = max(LEAST_LAUNCHES, len(placed), min(MOST_LAUNCHES, wanted))
        launches: list[Launch] = []
        try:
            prepared = [[self.launcher.prepare(call) for call in each] for each in placed]
            for index in range(count):
                launches += prepared[index % len(placed)]
            return capture(self.launcher.stream(), launches), count
        except Exception as error:  # cuda.core's own has no public name
            logger.warning("%s %s: a plan cannot be launched: %s", shape.kind, shape.key, error)
            return None, count

    def _replay(self, stack: ExitStack, graph: CapturedGraph) -> Callable[[], None]:
        stack.callback(_close, graph)
        stream = self.launcher.stream()
        return lambda: graph.launch(stream)


def _close(graph: CapturedGraph) -> None:
    with suppress(Exception):  # of a device that has failed; cuda.core's own has no public name
        graph.close()


def _num_bytes(call: KernelCall) -> int:
    """Bytes of all arguments: more than a launch moves where it reads a part of a cache."""
    return sum(each.nbytes for each in call.arguments if isinstance(each, torch.Tensor))


def _in_turns(replays: Sequence[Callable[[], None] | None]) -> list[float | None]:
    """The median of each one's replays, ms."""
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(TURNS):
        for replay, found in zip(replays, times, strict=True):
            if replay is not None:
                for _ in range(LEAD):
                    replay()
                found += event_times(replay, REPLAYS)
    return [median(found) if found else None for found in times]
