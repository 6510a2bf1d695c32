"""Covering a program's operations with kernel calls: which runs of operations are one group, and by which kernels.

Operations are taken in order. The first of a run picks a rule; a rule sees how far it can reach, and may leave a
buffer unwritten (hidden) only when nothing reads it after the group. This module knows kernels' builders and nothing
of how calls are compiled, launched or captured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors.device_weights import DeviceWeights
from lowlat.graphs import Role
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain.kernel import Card, KernelCall, Workspace
from lowlat.program.program import Op, Program, Stage

__all__ = ["Covered", "Group", "Lowering", "Rule", "lower", "unsupported"]


@dataclass(frozen=True)
class Group:
    """Operations that one or more kernel calls cover.

    hidden  buffers that the operations write by their meaning and the kernels keep to themselves
    """

    stage: Stage
    ops: tuple[Op, ...]
    calls: tuple[KernelCall, ...]
    hidden: frozenset[str]

    @property
    def written(self) -> tuple[str, ...]:
        """Buffers that hold what the operations wrote, in order, each once."""
        names = (name for op in self.ops for name in op.writes.values() if name not in self.hidden)
        return tuple(dict.fromkeys(names))


@dataclass
class Lowering:
    """What rules see, and leave for rules after them.

    loop  where the step is a loop's body
    best  the best pairs that products leave beside their logits, by these
    """

    program: Program
    buffers: Mapping[str, torch.Tensor]
    weights: DeviceWeights
    card: Card
    workspace: Workspace
    loop: LoopControl | None = None
    best: dict[str, torch.Tensor] = field(default_factory=dict)

    def kinds(self, start: int, *kinds: str) -> bool:
        """Whether the operations from `start` on are of these kinds."""
        ops = self.program.ops[start : start + len(kinds)]
        return tuple(op.kind for op in ops) == kinds

    def best_of(self, index: int) -> torch.Tensor:
        """The best pairs of the logits that an operation reads. Raises ConfigError where no product left them."""
        op = self.program.ops[index]
        found = self.best.get(op.reads["logits"])
        if found is None:
            raise ConfigError(f"{self.program.name}: {op.kind} must stand right behind the product of its logits")
        return found

    def following(self, start: int) -> Op | None:
        """The operation after one, if any."""
        ops = self.program.ops
        return ops[start + 1] if start + 1 < len(ops) else None

    def vectors(self, index: int) -> dict[str, Any]:
        """The weights of an operation that reads nothing but vectors, by argument name."""
        return {name: self.weights.vector(weight) for name, weight in self.program.ops[index].weights.items()}

    def arguments(self, *indices: int) -> dict[str, Any]:
        """The buffers and constants of operations by argument name, weights left out; later operations win."""
        merged: dict[str, Any] = {}
        for index in indices:
            op = self.program.ops[index]
            for names in (op.reads, op.writes):
                merged.update((argument, self.buffers[name]) for argument, name in names.items())
            merged.update(op.params)
        return merged

    def dies(self, name: str, after: int) -> bool:
        """Whether a scratch buffer is written before it is read, or never touched, past operation `after`."""
        if self.program.buffers[name].role is not Role.SCRATCH:
            return False
        for op in self.program.ops[after + 1 :]:
            if name in op.reads.values():
                return False
            if name in op.writes.values():
                return True
        return True


@dataclass(frozen=True)
class Covered:
    """What a rule made of the operations from its start on.

    fence  the call after these starts only when they have ended, and so do all later ones: what these write may be
           read by a kernel before it waits for the one before it
    """

    count: int
    calls: Sequence[KernelCall]
    hidden: Sequence[str] = ()
    fence: bool = False


Rule = Callable[[Lowering, int], Covered]


def unsupported(lowering: Lowering, start: int) -> Covered:
    """The rule of an operation that only other rules cover. Raises ConfigError, by name."""
    op = lowering.program.ops[start]
    raise ConfigError(f"{lowering.program.name}: operation {op} stands where no kernel covers it")


def lower(lowering: Lowering, rules: Mapping[str, Rule]) -> tuple[Group, ...]:
    """Cover a whole program. Raises ConfigError for an operation that no kernel covers, by name."""
    program, groups, start = lowering.program, [], 0
    fenced = True  # a step waits for the one before it
    while start < len(program.ops):
        op = program.ops[start]
        rule = rules.get(op.kind)
        if rule is None:
            raise ConfigError(f"{program.name}: operation {op.kind} has no kernel; use executor='reference'")
        covered = rule(lowering, start)
        ops = program.ops[start : start + covered.count]
        calls = list(covered.calls)
        if fenced:
            calls[0] = replace(calls[0], dependent=False)
        fenced = covered.fence
        groups.append(Group(op.stage, ops, tuple(calls), frozenset(covered.hidden)))
        start += covered.count
    return tuple(groups)
