"""This module has DSpark's kernels after its block's rows: parent tokens and vectors, their gate, biased logits."""

import math
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import divide, int_at, set_byte, set_int
from lowlat.kernels.common.norm_row import chunk_values, gather_chunk, is_live
from lowlat.kernels.elementwise.embed import check_table
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation import markov as reference
from lowlat.kernels.speculation.limits import VECTORS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, fit, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["bias_rows", "examples", "markov_gate", "parent_tokens", "parent_vectors"]

THREADS = 128
CHUNK = 8
FOUR = 4
PARENTS = 64  # rows of a level, at most


@launches(reference.parent_tokens)
def parent_tokens(given: Given) -> list[KernelCall]:
    """`parent_tokens` of the reference. Raises ShapeError for too many nodes with children."""
    kernel = _make_parents(*_parent_sizes(given), 0, False)
    return [KernelCall(kernel, (given["tokens"].shape[0], 1, 1), (*_parents(given), 0, 0))]


def parent_vectors(
    *, weight: torch.Tensor | PackedMatrix, vectors: torch.Tensor, **arguments: torch.Tensor | None
) -> list[KernelCall]:
    """`parent_tokens`, whose other arguments these are by name, and the `embed` of its parents, in one launch.

    weight   [V, N]      bf16, row-major or packed
    vectors  [B * W, N]  bf16  out: zero where dead
    Raises ShapeError for shapes that do not fit.
    """
    given, width = fit(reference.parent_tokens, arguments), vectors.shape[1]
    table, tiled = check_table(weight, width)
    check_shape("vectors", vectors, given["parents"].numel(), width)
    check_dtype(torch.bfloat16, vectors=vectors)
    VECTORS.check("parent_vectors: the rank", width)
    kernel = _make_parents(*_parent_sizes(given), width, tiled)
    return [KernelCall(kernel, (given["tokens"].shape[0], 1, 1), (*_parents(given), table, vectors))]


def _parent_sizes(given: Given) -> tuple[int, int, int]:
    """Rows of a block, nodes of a tree (0: none are drafted) and rows of a level. Raises ShapeError."""
    rows, num_nodes, wide = given.sizes("R", "T", "W")
    if not 1 <= wide <= PARENTS:
        raise ShapeError(f"parent_tokens: a level has 1 to {PARENTS} nodes with children, got {wide}")
    return rows, num_nodes, wide


def _parents(given: Given) -> tuple[Argument, ...]:
    """The arrays as the kernel takes them; nodes that are not drafted are read of the last known tokens."""
    drafted = given.arrays.get("draft_nodes", given["tokens"])
    return (given["tokens"], given["nodes"], drafted, given["parents"], given["row_live"])


@cache
def _make_parents(rows: int, num_nodes: int, wide: int, width: int, tiled: bool) -> Kernel:
    """A thread a node of the level, and eight elements of the nodes' vectors a thread in turn: grid (B,). Without nodes
    that were drafted, all are the last known token; with a width of 0 there are no vectors."""
    chunks, items = max(width // CHUNK, 1), wide * (width // CHUNK)

    @device_function
    def token_of(tokens: Any, nodes: Any, draft_nodes: Any, owner: Any, place: Any) -> Any:
        token = int_at(tokens, owner * rows)
        if num_nodes > 0:
            node = int_at(nodes, place)
            if node != 0 and token >= 0:
                token = int_at(draft_nodes, owner * num_nodes + node)
        return token

    def kernel(
        tokens: Any, nodes: Any, draft_nodes: Any, parents: Any, row_live: Any, weight: Any, vectors: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        if thread < wide:
            token = token_of(tokens, nodes, draft_nodes, owner, thread)
            set_int(parents, owner * wide + thread, token)
            set_byte(row_live, owner * wide + thread, 1 if token >= 0 else 0)
        for item in range(thread, items, PARENTS):
            place, chunk = divide(item, chunks)
            token = token_of(tokens, nodes, draft_nodes, owner, place)
            target = vectors + (owner * wide + place) * int64(2 * width)
            gather_chunk(weight, token, uint32(chunk), target, width, tiled)

    kind = f"parent_vectors_n{width}_{'packed' if tiled else 'rows'}" if width else "parent_tokens"
    return Kernel(f"{kind}_{rows}_{num_nodes}_{wide}", kernel, (types.int64,) * 7, PARENTS)


@device_function
def _gated(x: Any, a: Any, b: Any) -> Any:
    """x * sigmoid(a + b) in float32."""
    return ptx.mul_rn(x, _sigmoid(ptx.add_rn(a, b)))


@device_function
def _sigmoid(x: Any) -> Any:
    return float32(1.0) / ptx.add_rn(float32(1.0), math.exp(-x))


@launches(reference.markov_gate)
def markov_gate(given: Given) -> list[KernelCall]:
    """`markov_gate` of the reference, of bf16. Raises ShapeError for a row that is not there, and other ranks."""
    rows, width, block, wide = given.sizes("M", "r", "R", "W")
    row = _row_of_block(given, rows, block)
    check_dtype(torch.bfloat16, x=given["x"])
    VECTORS.check("markov_gate: the rank", width)
    grid = (rows, -(-(width // CHUNK) // THREADS), 1)
    return [KernelCall(_make_gate(width, wide, block, row), grid, given.tensors)]


def _row_of_block(given: Given, rows: int, block: int) -> int:
    """The row of a slot's block that is read. Raises ShapeError where it is not there, and unless W rows a slot fit."""
    row: int = given.params["row"]
    if rows != given["row_live"].numel():
        raise ShapeError(f"row_live must have {rows} entries, got {given['row_live'].numel()}")
    if not 0 <= row < block:
        raise ShapeError(f"row must be from 0 to {block - 1}, got {row}")
    return row


@cache
def _make_gate(width: int, wide: int, block: int, row: int) -> Kernel:
    """Eight elements a thread: grid (B * W, chunks of a row / THREADS)."""

    def kernel(x: Any, token_gate: Any, state_gate: Any, row_live: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = int64(cuda.blockIdx.x)
        owner, _ = divide(place, wide)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(width // CHUNK):
            v = chunk_values(x + place * int64(2 * width), chunk, False)
            a = chunk_values(token_gate + place * int64(4 * width), chunk, True)
            b = chunk_values(state_gate + (owner * block + row) * int64(4 * width), chunk, True)
            w0 = ptx.bf16_pair(_gated(v[0], a[0], b[0]), _gated(v[1], a[1], b[1]))
            w1 = ptx.bf16_pair(_gated(v[2], a[2], b[2]), _gated(v[3], a[3], b[3]))
            w2 = ptx.bf16_pair(_gated(v[4], a[4], b[4]), _gated(v[5], a[5], b[5]))
            w3 = ptx.bf16_pair(_gated(v[6], a[6], b[6]), _gated(v[7], a[7], b[7]))
            if not is_live(row_live, place):
                w0, w1, w2, w3 = uint32(0), uint32(0), uint32(0), uint32(0)
            ptx.store_global_128(out + place * int64(2 * width) + int64(chunk) * int64(16), w0, w1, w2, w3)

    return Kernel(f"markov_gate_{width}_{wide}_{block}_{row}", kernel, (types.int64,) * 5, THREADS)


@launches(reference.bias_rows)
def bias_rows(given: Given) -> list[KernelCall]:
    """`bias_rows` of the reference. Raises ShapeError for a row that is not there."""
    rows, width, block, wide = given.sizes("M", "Vd", "R", "W")
    kernel = _make_bias(width, wide, block, _row_of_block(given, rows, block))
    step = FOUR if width % FOUR == 0 else 1
    return [KernelCall(kernel, (rows, -(-(width // step) // THREADS), 1), given.tensors)]


@cache
def _make_bias(width: int, wide: int, block: int, row: int) -> Kernel:
    """Four elements a thread, one where rows have no whole fours: grid (B * W, such parts of a row / THREADS)."""
    is_wide = width % FOUR == 0
    parts = width // FOUR if is_wide else width

    def kernel(logits: Any, bias: Any, row_live: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = int64(cuda.blockIdx.x)
        owner, _ = divide(place, wide)
        part = int64(cuda.blockIdx.y) * int64(THREADS) + int64(cuda.threadIdx.x)
        if part < int64(parts):
            live = is_live(row_live, place)
            source, own = logits + (owner * block + row) * int64(4 * width), bias + place * int64(4 * width)
            target = out + place * int64(4 * width)
            if is_wide:
                a, b = ptx.load_global_128(source + part * int64(16)), ptx.load_global_128(own + part * int64(16))
                w0, w1, w2, w3 = _sum(a[0], b[0]), _sum(a[1], b[1]), _sum(a[2], b[2]), _sum(a[3], b[3])
                if not live:
                    w0, w1, w2, w3 = uint32(0), uint32(0), uint32(0), uint32(0)
                ptx.store_global_128(target + part * int64(16), w0, w1, w2, w3)
            else:
                at = part * int64(4)
                total = ptx.add_rn(ptx.load_global_f32(source + at), ptx.load_global_f32(own + at))
                ptx.store_global_f32(target + at, total if live else float32(0.0))

    return Kernel(f"bias_rows_{width}_{wide}_{block}_{row}", kernel, (types.int64,) * 4, THREADS)


@device_function
def _sum(a: Any, b: Any) -> Any:
    """The bits of the sum of two float32 by their bits."""
    return ptx.bits_of_float(ptx.add_rn(ptx.float_of_bits(a), ptx.float_of_bits(b)))


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [
        _make_parents(7, 0, 1, 0, False),
        _make_parents(7, 8, 1, 0, False),
        _make_parents(7, 0, 1, 256, False),
        _make_parents(7, 9, 3, 256, True),
        _make_gate(256, 1, 7, 3),
        _make_bias(151936, 1, 7, 3),
        _make_bias(97, 2, 4, 1),
    ]
