"""This module finds the weights that a program's GEMMs read: matrices, parts of quantised ones, and experts."""

from collections.abc import Iterable

import torch

from lowlat.graphs.program import Op, Program
from lowlat.kernels.formats import matrix_name, matrix_parts

__all__ = ["EXPERT_GEMMS", "GEMMS", "PACKED", "MatrixParts", "expert_parts", "experts_name", "packed_weights"]

EXPERT_GEMMS = ("experts_gate_up", "experts_down")
GEMMS = ("linear", "narrow_linear")
PACKED = {"linear": ("weight",)}  # arguments of weights that every implementation of an operation reads packed


def experts_name(op: Op) -> str:
    """The common prefix of the weights of an experts' GEMM."""
    return next(iter(op.weights.values())).rpartition(".")[0]


def expert_parts(programs: Iterable[Program], held: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each experts' GEMM, the weights that hold its matrices by part: those that operations name, or a format's.

    held  names of all weights
    """
    known = set(held)  # asking a source that reads files for a weight would read it
    found: dict[str, dict[str, str]] = {}
    for program in programs:
        for op in program.ops:
            if op.kind in EXPERT_GEMMS and experts_name(op) not in found:
                parts = {argument: weight for argument, weight in op.weights.items() if argument != "bias"}
                stands = matrix_parts(parts["weight"], known) if "weight" in parts else {}
                found[experts_name(op)] = stands or parts
    return found


def packed_weights(programs: Iterable[Program]) -> set[str]:
    """The weights of programs that are packed on the device, in any format."""
    return {op.weights[name] for program in programs for op in program.ops for name in PACKED.get(op.kind, ())}


class MatrixParts:
    """Collects the parts of quantised matrices; `names` has all weights that will be given to it."""

    def __init__(self, names: Iterable[str]) -> None:
        every = set(names)
        matrices = {name: None for each in every if (name := matrix_name(each)) is not None}
        self._parts = {name: parts for name in matrices if "weight" not in (parts := matrix_parts(name, every))}
        self._owner = {weight: (name, part) for name, parts in self._parts.items() for part, weight in parts.items()}
        self._found: dict[str, dict[str, torch.Tensor]] = {}

    def owns(self, weight: str) -> bool:
        """Whether a weight is a part of such a matrix."""
        return weight in self._owner

    def take(self, weight: str, tensor: torch.Tensor) -> tuple[str, dict[str, torch.Tensor]] | None:
        """Add a part; the last one returns the matrix's name in operations and its parts, others None."""
        name, part = self._owner[weight]
        found = self._found.setdefault(name, {})
        found[part] = tensor
        return (name, self._found.pop(name)) if len(found) == len(self._parts[name]) else None
