"""Capturing launches into a CUDA graph, and the audit of what was captured. It knows no kernel by name.

Launches of a library's operations are captured like those of kernels, from torch's current stream. Memory that the
library takes meanwhile must come from a pool that lives as long as the graph: that is the caller's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lowlat.errors import DeviceError, LowlatError
from lowlat.graphs.launch import KernelLaunch, Launch

__all__ = ["CapturedGraph", "audit", "capture", "capture_loop"]

KERNEL = "KernelNode"
LIBRARY = ("KernelNode", "MemcpyNode", "MemsetNode")  # a library's operations may leave these
CONDITIONAL = ("WhileNode", "ConditionalNode")  # drivers before CUDA 13.2 do not tell which conditional node it is


@dataclass
class CapturedGraph:
    """An instantiated graph; `num_kernels` counts its kernel nodes, a loop's body included once."""

    graph: Any
    num_kernels: int

    def launch(self, stream: Any) -> None:
        """Replay on a cuda.core Stream, asynchronously. Raises DeviceError when the device has failed."""
        try:
            self.graph.launch(stream)
        except Exception as error:  # cuda.core's own has no public name
            raise DeviceError(f"a captured step cannot be launched: {error}") from error

    def close(self) -> None:
        """Release the graph."""
        self.graph.close()


def capture(stream: Any, launches: Sequence[Launch]) -> CapturedGraph:
    """Capture launches in order.

    Raises DeviceError where the graph holds anything but those kernels and what a library's operations launch, or the
    driver refuses what is captured; the stream is as before.
    """
    with _building(stream) as builder:
        for launch in launches:
            launch.issue(builder)
        builder.end_building()
        kinds = _kinds(builder.graph_definition)
        num_ours = sum(isinstance(launch, KernelLaunch) for launch in launches)
        audit(kinds, num_ours, library=num_ours < len(launches))
        graph = builder.complete()
    graph.upload(stream)
    return CapturedGraph(graph, kinds.count(KERNEL))


def capture_loop(stream: Any, body: Callable[[int], Iterable[Launch]]) -> CapturedGraph:
    """Capture a WHILE node around the launches that `body` gives for its condition's handle.

    One of the body's kernels must set the condition. Raises DeviceError as `capture` does.
    """
    with _building(stream) as builder:
        condition = builder.create_condition(default_value=1)
        loop = builder.while_loop(condition)
        loop.begin_building("relaxed")
        count = 0
        for launch in body(int(condition.handle)):
            launch.issue(loop)
            count += 1
        loop.end_building()
        builder.end_building()
        audit(_kinds(loop.graph_definition), count)
        kinds = _kinds(builder.graph_definition)
        if len(kinds) != 1 or kinds[0] not in CONDITIONAL:
            raise DeviceError(f"a device loop must be one conditional node, the capture holds {kinds}")
        graph = builder.complete()
    graph.upload(stream)
    return CapturedGraph(graph, count)


@contextmanager
def _building(stream: Any) -> Iterator[Any]:
    """A graph builder on a stream, which leaves the stream usable when building fails."""
    builder = stream.create_graph_builder().begin_building("relaxed")
    try:
        yield builder
    except Exception as error:
        with suppress(Exception):  # an invalid capture says so once more when it is ended
            builder.close()
        if isinstance(error, LowlatError):
            raise
        raise DeviceError(f"a step cannot be captured: {error}") from error  # cuda.core's own has no public name


def audit(kinds: Sequence[str], expected: int, *, library: bool = False) -> None:
    """Check that a capture holds `expected` kernels and nothing else: no copy, allocation, host call or event.

    library  a library's operations were captured, too: they may add kernels, copies and fills, but nothing that waits,
             allocates or calls the host
    """
    others = sorted({kind for kind in kinds if kind not in (LIBRARY if library else (KERNEL,))})
    count = kinds.count(KERNEL)
    if others or count < expected or (count > expected and not library):
        raise DeviceError(
            f"a captured step must hold {expected} kernels, it holds {len(kinds)} nodes, others: {others}"
        )


def _kinds(definition: Any) -> list[str]:
    return [type(node).__name__ for node in definition.nodes()]
