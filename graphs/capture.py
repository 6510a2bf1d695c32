"""This module captures launches into a CUDA graph: a sequence of them, or an opening and a choice among bodies.

Launches of a library's operations are captured like those of kernels, from torch's current stream. Memory that the
library takes meanwhile must come from a pool that lives as long as the graph: that is the caller's.
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

Body = Callable[[int], Iterable[Launch]]  # the launches of a part, by the handle of the condition that it sets


@dataclass(frozen=True)
class Choice:
    """The parts of a step that chooses among bodies.

    opening  gives the launches before the choice for the handle of the SWITCH node's condition, which one of them sets
    bodies   the launches of each, by the number that is chosen; in a loop they are given the loop's condition
    """

    opening: Body
    bodies: Sequence[Body]


def capture(stream: Any, launches: Sequence[Launch]) -> CapturedGraph:
    """Capture launches in order.

    Raises DeviceError where the graph holds anything but those kernels and what a library's operations launch, or the
    driver refuses what is captured; the stream is as before.
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
    """Record a choice; `condition` is what its bodies are given. Returns the number of kernels."""
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


@contextmanager
def capturing(body: Any) -> Iterator[None]:
    """Capture into the body of a conditional node.

    When that fails the body's capture ends first, then those around it: a body that captured on would write into a
    graph that is gone, whenever Python collects it.
    """
    body.begin_building("relaxed")
    try:
        yield
    except BaseException:
        with suppress(Exception):
            body.close()
        raise
    body.end_building()
