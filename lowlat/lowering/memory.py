"""This module counts beforehand what lowered programs take of a GPU's memory next to their buffers.

`lowered_needs` are the workspaces that kernels ask for and the operations that no kernel covers, found by lowering;
`temporary_bytes` is an upper bound of the memory that torch's operations take for these while they run.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from lowlat.graphs import Role
from lowlat.graphs.program import Op, Program
from lowlat.graphs.scratch import may_overlap
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.lowering.binding import Binding
from lowlat.lowering.lower import LoweredGroup, lower
from lowlat.lowering.prefill_attention import FLASH_DIM, refresh_bytes
from lowlat.lowering.weight_parts import GEMMS

__all__ = [
    "FormOf", "LoweredNeeds", "Workspaces", "few_layers", "largest", "lowered_needs", "memory_of", "temporary_bytes",
    "workspace_bytes",
]  # fmt: skip

ATTENTION = ("prefill_attention", "refresh_attention")
LIBRARY_BYTES = 64 << 20  # workspaces of the matrix libraries, and what the allocator rounds up
SUMS = 4  # float32 copies of attention's sums of weights, at most
KEPT_ALIKE = 2  # layers of one kind that stand in a row: a layer's launches may depend on the one before it
OWN_NUMBER = "layer"  # the parameter that says which layer an operation is of
LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")

ShapeOf = Callable[[str], torch.Size]
FormOf = Callable[[str], object]
Workspaces = Mapping[tuple[str, torch.dtype], int]


class _Asked:
    """Workspaces without memory, and the most elements that were asked of each."""

    def __init__(self) -> None:
        self.most: dict[tuple[str, torch.dtype], int] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.most[name, dtype] = max(self.most.get((name, dtype), 0), math.prod(shape))
        return torch.empty(shape, dtype=dtype, device="meta")


class LoweredNeeds(NamedTuple):
    """The needs of lowered programs that share their workspaces.

    workspaces  the elements that each needs, by name and dtype
    by_library  operations that a library covers, each with its program
    unused      by program scratch that no call is given: fused launches keep to themselves what it would hold; none of
                programs whose scratch never overlaps
    """

    workspaces: Workspaces
    by_library: tuple[tuple[Program, Op], ...]
    unused: tuple[frozenset[str], ...]


def lowered_needs(bindings: Iterable[Binding], *, fuse: bool = True) -> LoweredNeeds:
    """The needs of programs that share their workspaces.

    bindings  of programs onto any memory, of few layers each; nothing is taken of their own workspaces
    fuse      see `lower`
    """
    asked, by_library, unused = _Asked(), list[tuple[Program, Op]](), list[frozenset[str]]()
    for binding in bindings:
        groups = lower(replace(binding, workspace=asked, fresh={}), fuse=fuse)
        called = (group for group in groups if len(group.kernel_calls) < len(group.calls))
        by_library += [(binding.program, op) for group in called for op in group.ops]
        unused.append(_unused(binding, groups))
    sizes = {key: count for key, count in asked.most.items() if count}
    return LoweredNeeds(sizes, tuple(by_library), tuple(unused))


def _unused(binding: Binding, groups: Iterable[LoweredGroup]) -> frozenset[str]:
    if not may_overlap(binding.program):
        return frozenset()
    given = {memory_of(tensor) for group in groups for call in group.calls for tensor in call.tensors}
    uses = binding.program.uses  # others are of layers that were left out
    scratch = [spec.name for spec in binding.program.specs(Role.SCRATCH) if spec.name in uses]
    return frozenset(name for name in scratch if memory_of(binding.buffers[name]) not in given)


def memory_of(tensor: torch.Tensor) -> int:
    """A number of a tensor's memory, of one without any, too: views have that of their base."""
    return int(tensor.untyped_storage()._cdata)


def largest(*several: Workspaces) -> Workspaces:
    """The most elements that are asked of each workspace."""
    most: dict[tuple[str, torch.dtype], int] = {}
    for sizes in several:
        for key, count in sizes.items():
            most[key] = max(most.get(key, 0), count)
    return most


def workspace_bytes(workspaces: Workspaces) -> int:
    """Bytes of workspaces."""
    return sum(count * dtype.itemsize for (_, dtype), count in workspaces.items())


def few_layers(program: Program, form_of: FormOf) -> Program:
    """The program without the layers that are like KEPT_ALIKE before them in a row of layers: its workspaces stay.

    form_of  equal for weights of one format, by their canonical names
    """
    ops: list[Op] = []
    seen: dict[object, int] = {}
    for layer, part in _layers(program):
        if not layer:
            seen.clear()
        kind = tuple(_kind(program, op, form_of) for op in part)
        seen[kind] = seen.get(kind, 0) + 1
        if not layer or seen[kind] <= KEPT_ALIKE:
            ops += part
    return replace(program, ops=tuple(ops))


def _layers(program: Program) -> Iterable[tuple[str, list[Op]]]:
    """The operations of each layer in order, with its name; those of no layer with "". One without weights goes with
    those before it."""
    name, part = "", list[Op]()
    for op in program.ops:
        own = name
        if op.weights:
            found = LAYER.search(first := next(iter(op.weights.values())))
            own = "" if found is None else first[: found.end()]
        if own != name and part:
            yield name, part
            part = []
        name = own
        part.append(op)
    yield name, part


def _kind(program: Program, op: Op, form_of: FormOf) -> object:
    """Equal for operations of the same sizes and formats, whichever layer's."""
    buffers = tuple(
        (argument, spec.shape, spec.dtype, spec.role)
        for argument, spec in ((name, program.buffers[each]) for name, each in (*op.reads.items(), *op.writes.items()))
    )
    weights = tuple((name, form_of(each)) for name, each in op.weights.items())
    params = tuple((name, value) for name, value in op.params.items() if name != OWN_NUMBER)
    return op.kind, op.stage, buffers, weights, params


def temporary_bytes(by_library: Iterable[tuple[Program, Op]], shape_of: ShapeOf) -> int:
    """Bytes that torch's operations take in prefill's largest chunk; none where kernels cover all.

    by_library  see `LoweredNeeds`
    shape_of    the shape of a GEMM's matrix [N, K] by its canonical name
    The largest GEMM and the largest attention are added up: the allocator may keep blocks of one size from serving
    another.
    """
    largest: dict[str, int] = {}
    for program, op in by_library:
        if op.kind in GEMMS:
            kind, size = "gemm", program.buffers[op.reads["x"]].shape[0]
            found = _gemm_bytes(size, shape_of(op.weights["weight"]))
        elif op.kind in ATTENTION:
            kind, found = "attention", _attention_bytes(program, op)
        else:
            continue
        largest[kind] = max(largest.get(kind, 0), found)
    return sum(largest.values()) + LIBRARY_BYTES if largest else 0


def _gemm_bytes(size: int, shape: torch.Size) -> int:
    """The unpacked matrix, and the output in the order of its packed rows."""
    rows, columns = shape
    padded = -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS
    return 2 * padded + 4 * size * rows


def _attention_bytes(program: Program, op: Op) -> int:
    """The result and its sums; in float32 where sinks scale it, and a second time, in both, of heads that flash
    attention does not take."""
    size, heads, dim = program.buffers[op.reads["q"]].shape
    if op.kind == "refresh_attention":
        return refresh_bytes(size, heads, dim, program.buffers["tokens"].shape[1])
    number = (6 if "sinks" in op.weights else 2) + (6 if dim > FLASH_DIM else 0)
    return number * size * heads * dim + SUMS * 4 * heads * size
