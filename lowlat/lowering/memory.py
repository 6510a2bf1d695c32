"""This module computes, before allocation, the GPU memory that lowered programs need besides their buffers.

`lowered_needs` lowers programs to find the workspaces of kernels and the operations without a kernel.
`temporary_bytes` is an upper bound of the memory that torch's operations take for the latter while they run.
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
LIBRARY_BYTES = 64 << 20  # workspaces of the matrix libraries, and rounding by the allocator
SUMS = 4  # float32 copies of attention's sums of weights, at most
KEPT_ALIKE = 2  # consecutive layers of one kind that are kept: a layer's launches may depend on the one before it
OWN_NUMBER = "layer"  # the parameter with an operation's layer
LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")

ShapeOf = Callable[[str], torch.Size]
FormOf = Callable[[str], object]
Workspaces = Mapping[tuple[str, torch.dtype], int]


class _Asked:
    """Workspaces without memory, with the most elements that were requested of each."""

    def __init__(self) -> None:
        self.most: dict[tuple[str, torch.dtype], int] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.most[name, dtype] = max(self.most.get((name, dtype), 0), math.prod(shape))
        return torch.empty(shape, dtype=dtype, device="meta")


class LoweredNeeds(NamedTuple):
    """The needs of lowered programs that share their workspaces.

    workspaces  the elements of each, by name and dtype
    by_library  operations that a library computes, each with its program
    unused      by program, the scratch buffers that no call uses, since fused launches do not write them; empty for
                programs whose scratch never overlaps
    """

    workspaces: Workspaces
    by_library: tuple[tuple[Program, Op], ...]
    unused: tuple[frozenset[str], ...]


def lowered_needs(bindings: Iterable[Binding], *, fuse: bool = True) -> LoweredNeeds:
    """The needs of programs that share their workspaces.

    bindings  programs of few layers each, with any memory; their own workspaces are not used
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
    uses = binding.program.uses  # a buffer that is not there belongs to a layer that was left out
    scratch = [spec.name for spec in binding.program.specs(Role.SCRATCH) if spec.name in uses]
    return frozenset(name for name in scratch if memory_of(binding.buffers[name]) not in given)


def memory_of(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's memory, also on the meta device; views have their base's number."""
    return int(tensor.untyped_storage()._cdata)


def largest(*several: Workspaces) -> Workspaces:
    """The most elements that are requested of each workspace."""
    most: dict[tuple[str, torch.dtype], int] = {}
    for sizes in several:
        for key, count in sizes.items():
            most[key] = max(most.get(key, 0), count)
    return most


def workspace_bytes(workspaces: Workspaces) -> int:
    """The size of workspaces in bytes."""
    return sum(count * dtype.itemsize for (_, dtype), count in workspaces.items())


def few_layers(program: Program, form_of: FormOf) -> Program:
    """The program without layers that equal the KEPT_ALIKE layers before them; it needs the same workspaces.

    form_of  returns an equal value for weights of one format, by canonical name
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
    """The operations of each layer in order, with its name; "" for those outside layers. An operation without weights
    belongs to the layer of the one before it."""
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
    """A value that is equal for operations of the same sizes and formats in all layers."""
    buffers = tuple(
        (argument, spec.shape, spec.dtype, spec.role)
        for argument, spec in ((name, program.buffers[each]) for name, each in (*op.reads.items(), *op.writes.items()))
    )
    weights = tuple((name, form_of(each)) for name, each in op.weights.items())
    params = tuple((name, value) for name, value in op.params.items() if name != OWN_NUMBER)
    return op.kind, op.stage, buffers, weights, params


def temporary_bytes(by_library: Iterable[tuple[Program, Op]], shape_of: ShapeOf) -> int:
    """Bytes that torch's operations take in prefill's largest chunk; 0 if kernels compute everything.

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
    """Bytes of the unpacked matrix, and of the output in the order of its packed rows."""
    rows, columns = shape
    padded = -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS
    return 2 * padded + 4 * size * rows


def _attention_bytes(program: Program, op: Op) -> int:
    """Bytes of the result and its sums; in float32 if sinks scale it, and twice, in both dtypes, for heads that flash
    attention does not support."""
    size, heads, dim = program.buffers[op.reads["q"]].shape
    if op.kind == "refresh_attention":
        return refresh_bytes(size, heads, dim, program.buffers["tokens"].shape[1])
    number = (6 if "sinks" in op.weights else 2) + (6 if dim > FLASH_DIM else 0)
    return number * size * heads * dim + SUMS * 4 * heads * size
