"""This module captures launches into a CUDA graph: a sequence of them, or an opening and a choice among bodies.

Launches of a library's operations are captured like those of kernels, from torch's current stream. The caller must make
the library allocate from a pool that lives as long as the graph.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lowlat.errors import DeviceError, LowlatError
from lowlat.graphs.audit import KERNEL, audit, audit_choice, node_kinds
from lowlat.graphs.launch import KernelLaunch, Launch
from lowlat.graphs.replay import CapturedGraph

__all__ = ["Body", "Choice", "building", "capture", "capture_choice", "capturing", "issue", "issue_choice"]

Body = Callable[[int], Iterable[Launch]]  # returns launches, given the handle of the condition that one of them sets


@dataclass(frozen=True)
class Choice:
    """The parts of a step that chooses among bodies.

    opening  returns the launches before the choice, given the SWITCH node's condition, which one of them sets
    bodies   each returns a body's launches; the condition's value is the index of the body that runs. In a device loop
             they are given the loop's condition
    """

    opening: Body
    bodies: Sequence[Body]


def capture(stream: Any, launches: Sequence[Launch]) -> CapturedGraph:
    """Capture launches in order.

    Raises DeviceError if the graph holds anything but these kernels and the nodes of a library's operations, or if the
    driver refuses the capture. The stream stays usable.
    """
    with building(stream) as builder:
        for launch in launches:
            launch.issue(builder)
        builder.end_building()
        kinds = node_kinds(builder.graph_definition)
        num_ours = sum(isinstance(launch, KernelLaunch) for launch in launches)
        audit(kinds, num_ours, library=num_ours < len(launches))
        graph = builder.complete()
    graph.upload(stream)
    return CapturedGraph(graph, kinds.count(KERNEL))


def capture_choice(stream: Any, choice: Choice) -> CapturedGraph:
    """Capture an opening, and a SWITCH node over its bodies. Raises DeviceError as `capture` does."""
    with building(stream) as builder:
        count = issue_choice(builder, choice, 0)
        builder.end_building()
        audit_choice(node_kinds(builder.graph_definition))
        graph = builder.complete()
    graph.upload(stream)
    return CapturedGraph(graph, count)


def issue(builder: Any, launches: Iterable[Launch]) -> int:
    """Record launches; returns their number."""
    count = 0
    for launch in launches:
        launch.issue(builder)
        count += 1
    return count


def issue_choice(builder: Any, choice: Choice, condition: int) -> int:
    """Record a choice; its bodies are called with `condition`. Returns the number of launches."""
    chosen = builder.create_condition(default_value=0)
    count = issue(builder, choice.opening(int(chosen.handle)))
    for body, part in zip(choice.bodies, builder.switch(chosen, len(choice.bodies)), strict=True):
        with capturing(part):
            issued = issue(part, body(condition))
        audit(node_kinds(part.graph_definition), issued)
        count += issued
    return count


@contextmanager
def building(stream: Any) -> Iterator[Any]:
    """Begin a graph on a stream; if building fails, the stream stays usable."""
    builder = stream.create_graph_builder().begin_building("relaxed")
    try:
        yield builder
    except Exception as error:
        with suppress(Exception):  # ending an invalid capture raises the same error again
            builder.close()
        if isinstance(error, LowlatError):
            raise
        raise DeviceError(f"a step cannot be captured: {error}") from error  # cuda.core's error has no public name


@contextmanager
def capturing(body: Any) -> Iterator[None]:
    """Capture into the body of a conditional node.

    If that fails, the body's capture ends before the captures around it. Otherwise Python would end it later, when it
    collects the body, and the driver would write into a graph that is gone.
    """
    body.begin_building("relaxed")
    try:
        yield
    except BaseException:
        with suppress(Exception):
            body.close()
        raise
    body.end_building()
