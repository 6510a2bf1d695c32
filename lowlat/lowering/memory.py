"""This module counts beforehand what lowered programs take of a GPU's memory next to their buffers.

`workspaces_of` are those that kernels ask for, found by lowering; `temporary_bytes` is an upper bound of the memory
that torch's operations take in prefill while they run.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.lowering.binding import Binding
from lowlat.lowering.lower import lower
from lowlat.lowering.prefill_attention import FLASH_DIM, refresh_bytes
from lowlat.lowering.weight_parts import GEMMS

__all__ = ["FormOf", "Workspaces", "few_layers", "largest", "temporary_bytes", "workspace_bytes", "workspaces_of"]

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


def workspaces_of(bindings: Iterable[Binding], *, fuse: bool = True) -> Workspaces:
    """The workspaces of programs that share them, by name and dtype, and the elements that each needs.

    bindings  of programs onto any memory, of few layers each; nothing is taken of their own workspaces
    fuse      see `lower`
    """
    asked = _Asked()
    for binding in bindings:
        lower(replace(binding, workspace=asked, fresh={}), fuse=fuse)
    return {key: count for key, count in asked.most.items() if count}


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


def temporary_bytes(program: Program, shape_of: ShapeOf) -> int:
    """Bytes that torch's operations take in a prefill program's largest chunk; none of a program that is no prefill.

    shape_of  the shape of a GEMM's matrix [N, K] by its canonical name
    The largest GEMM and the largest attention are added up, all else is kernels: the allocator may keep blocks of one
    size from serving another.
    """
    ops = [op for op in program.ops if op.stage is Stage.PREFILL]
    if not ops:
        return 0
    size = program.buffers["prefill_tokens"].shape[0]
    largest = {"gemm": 0, "attention": 0}
    for op in ops:
        if op.kind in GEMMS:
            kind, found = "gemm", _gemm_bytes(size, shape_of(op.weights["weight"]))
        elif op.kind in ATTENTION:
            kind, found = "attention", _attention_bytes(program, op)
        else:
            continue
        largest[kind] = max(largest[kind], found)
    return sum(largest.values()) + LIBRARY_BYTES


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
