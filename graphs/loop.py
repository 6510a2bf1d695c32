"""The device loop is a WHILE node whose body is a step; a budget and a flag end it.

One kernel of the body sets the node's condition. It counts the budget down, reads the flag, and ends the loop when no
slot is active. The host only starts loops, and asks them to stop.
"""

from typing import Any

import torch

from lowlat.graphs.audit import audit, audit_choice, audit_loop, node_kinds
from lowlat.graphs.capture import Body, Choice, building, capturing, issue, issue_choice
from lowlat.graphs.replay import CapturedGraph

__all__ = ["LoopMemory", "capture_loop"]


def capture_loop(stream: Any, body: Body | Choice) -> CapturedGraph:
    """Capture a WHILE node around the launches of `body`, which is called with the condition's handle, or a choice.

    One of the body's kernels must set the condition; in a choice, one kernel of each body. Raises DeviceError as
    `capture` does.
    """
    with building(stream) as builder:
        condition = builder.create_condition(default_value=1)
        loop = builder.while_loop(condition)
        with capturing(loop):
            if isinstance(body, Choice):
                count = issue_choice(loop, body, int(condition.handle))
            else:
                count = issue(loop, body(int(condition.handle)))
        builder.end_building()
        kinds = node_kinds(loop.graph_definition)
        if isinstance(body, Choice):
            audit_choice(kinds)
        else:
            audit(kinds, count)
        audit_loop(node_kinds(builder.graph_definition))
        graph = builder.complete()
    graph.upload(stream)
    return CapturedGraph(graph, count)


class LoopMemory:
    """The memory that ends a device's loops.

    budget     [1] int64 on the device: steps that the loop may still run
    stop_flag  [1] int64 in pinned memory: not 0 asks loops to end; several devices may share one
    """

    def __init__(self, device: torch.device, stop_flag: torch.Tensor | None = None) -> None:
        self.budget = torch.zeros(1, dtype=torch.int64, device=device)
        self.stop_flag = torch.zeros(1, dtype=torch.int64, pin_memory=True) if stop_flag is None else stop_flag
        self.stopping = self.stop_flag.numpy()  # the same word, as the host reads and writes it

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Both tensors, for audits of addresses."""
        return [self.budget, self.stop_flag]

    def begin(self, budget: int) -> None:
        """Let the loop that is launched next run at most `budget` steps; called on its stream."""
        self.stopping[0] = 0  # the loop that was asked to stop has read it: the host has seen its last step
        self.budget.fill_(budget)  # on the stream: the loop before writes the budget after it has published

    def stop(self) -> None:
        """Ask every loop to end after its current step; returns at once."""
        self.stopping[0] = 1
