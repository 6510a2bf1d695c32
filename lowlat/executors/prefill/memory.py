"""What torch takes on a card while a chunk of prefill runs, beside the buffers: an upper bound, for the memory plan."""

from collections.abc import Callable

import torch

from lowlat.executors.lowering.weight_layouts import EXPERT_PRODUCTS
from lowlat.graphs import Role
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.program.program import Op, Program, Stage

__all__ = ["temporary_bytes"]

LIBRARY_BYTES = 64 << 20  # workspaces of the matrix libraries, and what the allocator rounds up
TEMPORARIES = 6  # float32 copies of a row-wise operation's widest operand, at most
SUMS = 4  # float32 copies of attention's sums of weights, at most


def temporary_bytes(program: Program, weight: Callable[[str], torch.Tensor]) -> int:
    """Bytes of a prefill program's largest chunk; none of a program that is no prefill.

    weight  a weight by its canonical name; only the matrices of products are asked for, [N, K]
    The largest product, the largest attention and the largest of all else are added up: the allocator may keep blocks
    of one size from serving another. Experts' products, and what attention gathers, have room of their own.
    """
    ops = [op for op in program.ops if op.stage is Stage.PREFILL]
    if not ops:
        return 0
    size = program.buffers["prefill_tokens"].shape[0]
    largest = {"product": 0, "attention": 0, "else": 0}
    for op in ops:
        if op.kind == "linear":
            kind, found = "product", _product_bytes(size, weight(op.weights["weight"]))
        elif op.kind == "prefill_attention":
            kind, found = "attention", _attention_bytes(program, op)
        elif op.kind in EXPERT_PRODUCTS:
            continue
        else:
            names = (*op.reads.values(), *op.writes.values())
            sizes = [program.buffers[name] for name in names if program.buffers[name].role is Role.SCRATCH]
            widest = max((spec.num_bytes // spec.dtype.itemsize for spec in sizes), default=0)
            kind, found = "else", TEMPORARIES * 4 * widest
        largest[kind] = max(largest[kind], found)
    return sum(largest.values()) + LIBRARY_BYTES


def _product_bytes(size: int, matrix: torch.Tensor) -> int:
    """The unpacked matrix, and the product in the packed rows' order."""
    rows, columns = matrix.shape
    padded = -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS
    return 2 * padded + 4 * size * rows


def _attention_bytes(program: Program, op: Op) -> int:
    """The result and its sums; in float32 where sinks scale it."""
    size, heads, dim = program.buffers[op.reads["q"]].shape
    return (6 if "sinks" in op.weights else 2) * size * heads * dim + SUMS * 4 * heads * size
