"""This module audits a captured graph: its nodes, and the memory that its launches point into."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lowlat.errors import DeviceError

__all__ = ["CONDITIONAL", "KERNEL", "OwnedMemory", "audit", "audit_choice", "audit_loop", "node_kinds"]

KERNEL = "KernelNode"
LIBRARY = ("KernelNode", "MemcpyNode", "MemsetNode")  # a library's operations may add these
# drivers before CUDA 13.2 do not tell a WHILE node from a SWITCH node
CONDITIONAL = ("WhileNode", "SwitchNode", "ConditionalNode")


def node_kinds(definition: Any) -> list[str]:
    """The kinds of the nodes of a graph's definition."""
    return [type(node).__name__ for node in definition.nodes()]


def audit(kinds: Sequence[str], expected: int, *, library: bool = False) -> None:
    """Check that a capture holds `expected` kernels and nothing else: no copy, allocation, host call or event.

    library  whether a library's operations were captured, too. They may add kernels, copies and fills, but no node that
             waits, allocates or calls the host
    Raises DeviceError.
    """
    others = sorted({kind for kind in kinds if kind not in (LIBRARY if library else (KERNEL,))})
    count = kinds.count(KERNEL)
    if others or count < expected or (count > expected and not library):
        raise DeviceError(
            f"a captured step must hold {expected} kernels, it holds {len(kinds)} nodes, others: {others}"
        )


def audit_choice(kinds: Sequence[str]) -> None:
    """Check that a capture holds kernels and one conditional node. Raises DeviceError."""
    others = [kind for kind in kinds if kind not in CONDITIONAL]
    if len(kinds) - len(others) != 1:
        raise DeviceError(
            f"a step that chooses its draft length must hold one conditional node, the capture holds {list(kinds)}"
        )
    audit(others, len(others))


def audit_loop(kinds: Sequence[str]) -> None:
    """Check that a capture is one conditional node; its body is audited separately. Raises DeviceError."""
    if len(kinds) != 1 or kinds[0] not in CONDITIONAL:
        raise DeviceError(f"a device loop must be one conditional node, the capture holds {list(kinds)}")


class OwnedMemory:
    """The memory that launches of a captured graph may point into: tensors that live as long as the graph."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = ((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()) for tensor in tensors)
        self._starts: list[int] = []
        self._ends: list[int] = []  # ascending, too: a span within another one is left out
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            if start < end and (not self._ends or end > self._ends[-1]):
                self._starts.append(start)
                self._ends.append(end)

    def check(self, name: str, arguments: Iterable[object]) -> None:
        """Raise DeviceError, which says `name`, if a tensor among a launch's arguments lies outside this memory."""
        for number, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor) and argument.numel():
                start = argument.data_ptr()
                end = start + argument.numel() * argument.element_size()
                place = bisect_right(self._starts, start) - 1
                if place < 0 or end > self._ends[place]:
                    raise DeviceError(f"{name}: argument {number} lies in memory that nobody owns")
