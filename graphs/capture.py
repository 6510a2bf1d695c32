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

__all__ = ["Body", "CapturedGraph", "Choice", "audit", "capture", "capture_choice", "capture_loop"]

KERNEL = "KernelNode"
LIBRARY = ("KernelNode", "MemcpyNode", "MemsetNode")  # a library's operations may leave these
# drivers before CUDA 13.2 do not tell which conditional node it is
CONDITIONAL = ("WhileNode", "SwitchNode", "ConditionalNode")
Body = Callable[[int], Iterable[Launch]]  # the launches of a part, by the handle of the condition that it sets


@dataclass
class CapturedGraph:
    """An instantiated graph; `num_kernels` counts its kernel nodes: a loop's body once, of a choice every body."""

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


def capture_choice(stream: Any, choice: Choice) -> CapturedGraph:
    """Capture an opening, and a SWITCH node over its bodies. Raises DeviceError as `capture` does."""
    with _building(stream) as builder:
        count = _issue_choice(builder, choice, 0)
        builder.end_building()
        _audit_choice(builder)
        graph = builder.complete()
    graph.upload(stream)
    return CapturedGraph(graph, count)


def _issue(builder: Any, launches: Iterable[Launch]) -> int:
    """Record launches; returns their number."""
    count = 0
    for launch in launches:
        launch.issue(builder)
        count += 1
    return count


def _issue_choice(builder: Any, choice: Choice, condition: int) -> int:
    """Record a choice; `condition` is what its bodies are given. Returns the number of kernels."""
    chosen = builder.create_condition(default_value=0)
    count = _issue(builder, choice.opening(int(chosen.handle)))
    for body, part in zip(choice.bodies, builder.switch(chosen, len(choice.bodies)), strict=True):
        with _capturing(part):
            issued = _issue(part, body(condition))
        audit(_kinds(part.graph_definition), issued)
        count += issued
    return count


def _audit_choice(builder: Any) -> None:
    """Check that a capture holds kernels and one conditional node."""
    kinds = _kinds(builder.graph_definition)
    others = [kind for kind in kinds if kind not in CONDITIONAL]
    if len(kinds) - len(others) != 1:
        raise DeviceError(f"a step that chooses its width must hold one conditional node, the capture holds {kinds}")
    audit(others, len(others))


def capture_loop(stream: Any, body: Body | Choice) -> CapturedGraph:
    """Capture a WHILE node around the launches that `body` gives for its condition's handle, or around a choice.

    One of the body's kernels must set the condition, of a choice one of each body's. Raises DeviceError as `capture`
    does.
    """
    with _building(stream) as builder:
        condition = builder.create_condition(default_value=1)
        loop = builder.while_loop(condition)
        with _capturing(loop):
            if isinstance(body, Choice):
                count = _issue_choice(loop, body, int(condition.handle))
            else:
                count = _issue(loop, body(int(condition.handle)))
        builder.end_building()
        if isinstance(body, Choice):
            _audit_choice(loop)
        else:
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


@contextmanager
def _capturing(body: Any) -> Iterator[None]:
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
