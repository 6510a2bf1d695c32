"""DSpark's kernels after its block's rows: parents' tokens and vectors, the gate of these, biased logits."""

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
from lowlat.kernels.speculation.limits import VECTORS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["bias_rows", "examples", "markov_gate", "parent_tokens", "parent_vectors"]

THREADS = 128
CHUNK = 8
FOUR = 4
PARENTS = 64  # rows of a level, at most


def parent_tokens(
    tokens: torch.Tensor,
    nodes: torch.Tensor,
    draft_nodes: torch.Tensor | None = None,
    *,
    parents: torch.Tensor,
    row_live: torch.Tensor,
) -> list[KernelCall]:
    """`parent_tokens` of the reference, whose arguments these are. Raises ShapeError for shapes that do not fit."""
    kernel = _make_parents(*_parent_sizes(tokens, nodes, draft_nodes, parents, row_live), 0, False)
    drafted = tokens if draft_nodes is None else draft_nodes
    return [KernelCall(kernel, (tokens.shape[0], 1, 1), (tokens, nodes, drafted, parents, row_live, 0, 0))]


def parent_vectors(
    tokens: torch.Tensor,
    nodes: torch.Tensor,
    draft_nodes: torch.Tensor | None = None,
    *,
    parents: torch.Tensor,
    row_live: torch.Tensor,
    weight: torch.Tensor | PackedMatrix,
    vectors: torch.Tensor,
) -> list[KernelCall]:
    """`parent_tokens` and the `embed` of its parents, see `rows.embed`, in one launch.

    weight   [V, N]      bf16, row-major or packed
    vectors  [B * W, N]  bf16  out: zero where dead
    Raises ShapeError for shapes that do not fit.
    """
    sizes, width = _parent_sizes(tokens, nodes, draft_nodes, parents, row_live), vectors.shape[1]
    table, tiled = check_table(weight, width)
    check_shape("vectors", vectors, parents.numel(), width)
    check_dtype(torch.bfloat16, vectors=vectors)
    VECTORS.check("parent_vectors: the rank", width)
    kernel, drafted = _make_parents(*sizes, width, tiled), tokens if draft_nodes is None else draft_nodes
    arguments = (tokens, nodes, drafted, parents, row_live, table, vectors)
    return [KernelCall(kernel, (tokens.shape[0], 1, 1), arguments)]


def _parent_sizes(
    tokens: torch.Tensor,
    nodes: torch.Tensor,
    draft_nodes: torch.Tensor | None,
    parents: torch.Tensor,
    row_live: torch.Tensor,
) -> tuple[int, int, int]:
    """Rows of a block, nodes of a tree (0: none are drafted) and rows of a level. Raises ShapeError."""
    (batch, rows), wide = tokens.shape, nodes.shape[0]
    num_nodes = 0 if draft_nodes is None else draft_nodes.shape[1]
    if draft_nodes is not None:
        check_shape("draft_nodes", draft_nodes, batch, num_nodes)
    for array in (parents, row_live):
        check_shape("parents and row_live", array, batch, wide)
    if not 1 <= wide <= PARENTS:
        raise ShapeError(f"parent_tokens: a level has 1 to {PARENTS} nodes with children, got {wide}")
    return rows, num_nodes, wide


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


def markov_gate(
    x: torch.Tensor,
    token_gate: torch.Tensor,
    state_gate: torch.Tensor,
    row_live: torch.Tensor,
    *,
    out: torch.Tensor,
    row: int,
) -> list[KernelCall]:
    """`markov_gate` of the reference, whose arguments these are. Raises ShapeError for shapes that do not fit."""
    rows, width = x.shape
    check_dtype(torch.bfloat16, x=x, out=out)
    check_shape("x", x, *out.shape)
    block = _block_rows(token_gate, state_gate, row_live, out, row)
    VECTORS.check("markov_gate: the rank", width)
    kernel = _make_gate(width, row_live.shape[1], block, row)
    grid = (rows, -(-(width // CHUNK) // THREADS), 1)
    return [KernelCall(kernel, grid, (x, token_gate, state_gate, row_live, out))]


def _block_rows(own: torch.Tensor, block: torch.Tensor, row_live: torch.Tensor, out: torch.Tensor, row: int) -> int:
    """Rows of a slot's block. Raises ShapeError unless W rows a slot and R of a block fit, and there is such a row."""
    (batch, wide), width = row_live.shape, out.shape[1]
    rows = block.shape[0] // batch
    check_dtype(torch.float32, own=own, block=block)
    check_shape("out", out, batch * wide, width)
    check_shape("each level's rows", own, batch * wide, width)
    check_shape("the block's rows", block, batch * rows, width)
    if not 0 <= row < rows:
        raise ShapeError(f"row must be from 0 to {rows - 1}, got {row}")
    return rows


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


def bias_rows(
    logits: torch.Tensor, bias: torch.Tensor, row_live: torch.Tensor, *, out: torch.Tensor, row: int
) -> list[KernelCall]:
    """`bias_rows` of the reference, whose arguments these are. Raises ShapeError for shapes that do not fit."""
    rows, width = bias.shape
    check_dtype(torch.float32, out=out)
    block = _block_rows(bias, logits, row_live, out, row)
    kernel = _make_bias(width, row_live.shape[1], block, row)
    step = FOUR if width % FOUR == 0 else 1
    return [KernelCall(kernel, (rows, -(-(width // step) // THREADS), 1), (logits, bias, row_live, out))]


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
