"""What torch takes on a card while a chunk of prefill runs, beside the buffers: an upper bound, for the memory plan."""

from collections.abc import Callable

import torch

from lowlat.executors.orders import EXPERT_PRODUCTS
from lowlat.executors.prefill.attention import reaches_of, span_of
from lowlat.graphs import Role
from lowlat.kernels.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.program import Op, Program, Stage

__all__ = ["temporary_bytes"]

LIBRARY_BYTES = 64 << 20  # workspaces of the matrix libraries, and what the allocator rounds up
TEMPORARIES = 6  # float32 copies of a row-wise operation's widest operand, at most
MASK_BYTES = 6  # of a position while a mask is made: comparisons, their negation, the mask itself


def temporary_bytes(program: Program, weight: Callable[[str], torch.Tensor]) -> int:
    """Bytes of a prefill program's largest chunk; none of a program that is no prefill.

    weight  a weight by its canonical name; only the matrices of products are asked for, [N, K]
    The largest product, the largest attention and the largest of all else are added up: the allocator may keep blocks
    of one size from serving another. Experts' products have room of their own.
    """
    ops = [op for op in program.ops if op.stage is Stage.PREFILL]
    if not ops:
        return 0
    size, longest = program.buffers["prefill_tokens"].shape[0], program.buffers["tokens"].shape[1]
    reach = reaches_of(size, longest)[-1]
    masks: set[int] = set()
    largest = {"product": 0, "attention": 0, "else": 0}
    for op in ops:
        if op.kind == "linear":
            kind, found = "product", _product_bytes(size, weight(op.weights["weight"]))
        elif op.kind == "prefill_attention":
            span = _span(program, op, size, reach)
            masks.add(span)
            kind, found = "attention", _attention_bytes(program, op, size, span)
        elif op.kind in EXPERT_PRODUCTS:
            continue
        else:
            names = (*op.reads.values(), *op.writes.values())
            sizes = [program.buffers[name] for name in names if program.buffers[name].role is Role.SCRATCH]
            widest = max((spec.num_bytes // spec.dtype.itemsize for spec in sizes), default=0)
            kind, found = "else", TEMPORARIES * 4 * widest
        largest[kind] = max(largest[kind], found)
    masked = 2 * size * sum(masks) + MASK_BYTES * size * max(masks, default=0)
    return sum(largest.values()) + masked + LIBRARY_BYTES


def _product_bytes(size: int, matrix: torch.Tensor) -> int:
    """The unpacked matrix, and the product in the packed rows' order."""
    rows, columns = matrix.shape
    padded = -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS
    return 2 * padded + 4 * size * rows


def _span(program: Program, op: Op, size: int, reach: int) -> int:
    window, keep_first = op.params.get("window"), op.params.get("keep_first", 0)
    block = program.buffers[op.reads["k_cache"]].shape[2]
    if not (window is None or isinstance(window, int)) or not isinstance(keep_first, int):
        return reach
    return span_of(reach, size, block, window, keep_first)


def _attention_bytes(program: Program, op: Op, size: int, span: int) -> int:
    """Keys, values and one of them as it is gathered; the result, also in float32, and its sums."""
    _, heads, dim = program.buffers[op.reads["q"]].shape
    groups = program.buffers[op.reads["k_cache"]].shape[1]
    return 3 * 2 * groups * span * dim + (2 + 4) * size * heads * dim + 4 * heads * (size + 32)
