"""This module grows a dynamic tree: it adds a level's drafts, lays out the best as rows, and chooses the best of all.

A draft's place in the order is the number of better drafts, which a thread counts in shared memory. Rows are whole
multiples of 16 bytes.
"""

from functools import cache
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import (
    copy_row,
    divide,
    int_at,
    long_at,
    set_byte,
    set_int,
    set_long,
    turns,
    wide_count,
)
from lowlat.kernels.reference.speculation import grow as reference
from lowlat.kernels.reference.speculation.grow import LOWEST, MAX_ENTRIES, first_entry
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types

__all__ = ["choose_nodes", "examples", "grow_block_tree", "grow_tree"]

THREADS = 256
MINUS_INFINITY = float("-inf")


@launches(reference.grow_tree)
def grow_tree(given: Given) -> list[KernelCall]:
    """`grow_tree` of the reference. Raises ShapeError for entries that the tree has no place for."""
    batch, width, top_k, count = given.sizes("B", "W", "K", "N")
    depth = given.params["depth"]
    _check_entries(first_entry(depth, top_k), width * top_k, count)
    kernel = _make_level(width, top_k, count, depth, wide_count("feedback", given["feedback"]))
    return [KernelCall(kernel, (batch * top_k, 1, 1), given.tensors)]


@launches(reference.choose_nodes)
def choose_nodes(given: Given) -> list[KernelCall]:
    """`choose_nodes` of the reference. Raises ShapeError for entries that the tree has no place for."""
    batch, width, top_k, count, nodes = given.sizes("B", "W", "K", "N", "T")
    _check_entries(count - width * top_k, width * top_k, count)
    return [KernelCall(_make_choice(width, top_k, count, nodes), (batch, 1, 1), given.tensors)]


@launches(reference.grow_block_tree)
def grow_block_tree(given: Given) -> list[KernelCall]:
    """`grow_block_tree` of the reference. Raises ShapeError for rows that make no tree, or too large a one."""
    batch, rows, top_k, nodes = given.sizes("B", "R", "K", "T")
    first_row = given.params["first_row"]
    depth = rows - first_row
    if not 1 <= depth <= rows or first_entry(depth + 1, top_k) > MAX_ENTRIES:
        raise ShapeError(f"{rows} rows of {top_k} drafts from row {first_row} on make no tree of {MAX_ENTRIES} drafts")
    return [KernelCall(_make_block(rows, first_row, top_k, nodes), (batch, 1, 1), given.tensors)]


def _check_entries(start: int, added: int, count: int) -> None:
    if not 0 <= start <= start + added <= min(count, MAX_ENTRIES):
        end = start + added
        raise ShapeError(f"entries {start} to {end} do not fit a tree of {count}, at most {MAX_ENTRIES}")


@device_function
def _float_at(base: Any, index: Any) -> Any:
    return ptx.load_global_f32(base + int64(index) * int64(4))


@device_function
def _set_float(base: Any, index: Any, value: Any) -> None:
    ptx.store_global_f32(base + int64(index) * int64(4), value)


@device_function
def _score(above: Any, logprob: Any, token: Any) -> Any:
    """The score of a draft after a path; of none, minus infinity."""
    total = ptx.add_rn(above, logprob)
    if total < float32(LOWEST):
        total = float32(LOWEST)
    return total if token >= 0 else float32(MINUS_INFINITY)


@device_function
def _known(above: Any, token: Any) -> Any:
    """A draft's token; none after a draft that is missing."""
    return token if above >= float32(LOWEST) else int64(-1)


@device_function
def _rank(scores: Any, start: Any, end: Any, entry: Any) -> Any:
    """How many of the entries from `start` to `end` come before one of them."""
    mine, rank = scores[entry], int64(0)
    for other in range(start, entry):
        if scores[other] >= mine:
            rank += 1
    for other in range(entry + 1, end):
        if scores[other] > mine:
            rank += 1
    return rank


@device_function
def _choose(thread: Any, slot: Any, sizes: Any, shared: Any, draft_nodes: Any, draft_parents: Any) -> None:
    """Rank all entries, and write the nodes that the best of them become, by all threads.

    shared  tokens, scores and parents, complete; and the ranks, made here
    """
    count, nodes = sizes
    tokens, scores, parents, ranks = shared
    for turn in range(turns(count, THREADS)):
        entry = thread + turn * THREADS
        if entry < count:
            ranks[entry] = int32(_rank(scores, int64(0), int64(count), entry))
    for turn in range(turns(nodes, THREADS)):
        node = thread + turn * THREADS
        if node < nodes:
            set_int(draft_nodes, slot * nodes + node, int64(-1))
            set_int(draft_parents, slot * nodes + node, int64(-1))
    cuda.syncthreads()
    for turn in range(turns(count, THREADS)):
        entry = thread + turn * THREADS
        if entry < count:
            node, parent = int64(ranks[entry]) + 1, int64(parents[entry])
            if node < nodes and tokens[entry] >= 0:
                above = int64(0)
                if parent >= 0:
                    above = int64(ranks[parent]) + 1
                set_int(draft_nodes, slot * nodes + node, int64(tokens[entry]))
                set_int(draft_parents, slot * nodes + node, above)


@cache
def _make_level(width: int, top_k: int, count: int, depth: int, wide: int) -> Kernel:
    """A block a row of the next level: grid (B * K,); each enters the drafts for itself, the first for all."""
    children, start, before = width * top_k, first_entry(depth, top_k), (depth - 1) * top_k

    def kernel(
        top_tokens: Any,
        top_logprobs: Any,
        row_scores: Any,
        row_entries: Any,
        row_masks: Any,
        feedback: Any,
        draft_lens: Any,
        tree_tokens: Any,
        tree_scores: Any,
        tree_parents: Any,
        hidden: Any,
        tokens: Any,
        row_live: Any,
        positions: Any,
        next_scores: Any,
        next_entries: Any,
        next_masks: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        scores = cuda.shared.array(shape=children, dtype=types.float32)
        chosen = cuda.shared.array(shape=1, dtype=int32)
        index, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        slot, place = divide(index, top_k)
        for turn in range(turns(children, THREADS)):
            child = thread + turn * THREADS
            if child < children:
                row, _ = divide(child, top_k)
                above = _float_at(row_scores, slot * width + row)
                token = _known(above, int_at(top_tokens, slot * children + child))
                score = _score(above, _float_at(top_logprobs, slot * children + child), token)
                scores[child] = score
                if place == 0:
                    entry = slot * count + start + child
                    set_int(tree_tokens, entry, token)
                    _set_float(tree_scores, entry, score)
                    set_int(tree_parents, entry, int_at(row_entries, slot * width + row))
        cuda.syncthreads()
        for turn in range(turns(children, THREADS)):
            child = thread + turn * THREADS
            if child < children and _rank(scores, int64(0), int64(children), child) == place:
                chosen[0] = int32(child)
        cuda.syncthreads()
        child = int64(chosen[0])
        row, _ = divide(child, top_k)
        source = feedback + (slot * width + row) * (wide * 16)
        copy_row(thread, THREADS, wide, source, hidden + index * (wide * 16))
        if thread == 0:
            token, live, position, mask = int64(-1), int64(0), int64(0), int64(0)
            if scores[child] >= float32(LOWEST):
                token = int_at(top_tokens, slot * children + child)
                live, position = int64(1), int_at(draft_lens, slot) + (depth - 2)
                mask = long_at(row_masks, slot * width + row) | (int64(1) << (place + before))
            set_int(tokens, index, token)
            set_byte(row_live, index, live)
            set_int(positions, index, position)
            _set_float(next_scores, index, scores[child])
            set_int(next_entries, index, child + start)
            set_long(next_masks, index, mask)

    return Kernel(f"grow_tree_{width}_{top_k}_{count}_{depth}_{wide}", kernel, (types.int64,) * 17, THREADS)


@cache
def _make_choice(width: int, top_k: int, count: int, nodes: int) -> Kernel:
    """A block a slot: grid (B,)."""
    children = width * top_k
    start = count - children

    def kernel(
        top_tokens: Any,
        top_logprobs: Any,
        row_scores: Any,
        row_entries: Any,
        tree_tokens: Any,
        tree_scores: Any,
        tree_parents: Any,
        draft_nodes: Any,
        draft_parents: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        tokens = cuda.shared.array(shape=count, dtype=int32)
        scores = cuda.shared.array(shape=count, dtype=types.float32)
        parents = cuda.shared.array(shape=count, dtype=int32)
        ranks = cuda.shared.array(shape=count, dtype=int32)
        slot, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        for turn in range(turns(count, THREADS)):
            entry = thread + turn * THREADS
            place = slot * count + entry
            if entry < start:
                tokens[entry] = int32(int_at(tree_tokens, place))
                scores[entry] = _float_at(tree_scores, place)
                parents[entry] = int32(int_at(tree_parents, place))
            elif entry < count:
                child = slot * children + entry - start
                row, _ = divide(entry - start, top_k)
                above, parent = _float_at(row_scores, slot * width + row), int_at(row_entries, slot * width + row)
                token = _known(above, int_at(top_tokens, child))
                score = _score(above, _float_at(top_logprobs, child), token)
                tokens[entry], scores[entry], parents[entry] = int32(token), score, int32(parent)
                set_int(tree_tokens, place, token)
                _set_float(tree_scores, place, score)
                set_int(tree_parents, place, parent)
        cuda.syncthreads()
        _choose(thread, slot, (count, nodes), (tokens, scores, parents, ranks), draft_nodes, draft_parents)

    return Kernel(f"choose_nodes_{width}_{top_k}_{count}_{nodes}", kernel, (types.int64,) * 9, THREADS)


@cache
def _make_block(rows: int, first_row: int, top_k: int, nodes: int) -> Kernel:
    """A block a slot: grid (B,)."""
    depth = rows - first_row
    count, children = first_entry(depth + 1, top_k), top_k * top_k
    enter = _make_enter(top_k)

    def kernel(top_tokens: Any, top_logprobs: Any, draft_nodes: Any, draft_parents: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        tokens = cuda.shared.array(shape=count, dtype=int32)
        scores = cuda.shared.array(shape=count, dtype=types.float32)
        parents = cuda.shared.array(shape=count, dtype=int32)
        ranks = cuda.shared.array(shape=count, dtype=int32)
        best = cuda.shared.array(shape=top_k, dtype=int32)
        slot, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        shared = (tokens, scores, parents, best)
        for level in range(depth):
            first = (slot * rows + first_row + level) * top_k
            start = max(top_k + (level - 1) * children, 0)
            end = start + (children if level > 0 else top_k)
            for turn in range(turns(children, THREADS)):
                entry = start + thread + turn * THREADS
                if entry < end:
                    enter(entry - start, entry, level > 0, first, top_tokens, top_logprobs, shared)
            cuda.syncthreads()
            for turn in range(turns(children, THREADS)):
                entry = start + thread + turn * THREADS
                if entry < end:
                    rank = _rank(scores, int64(start), int64(end), entry)
                    if rank < top_k:
                        best[rank] = int32(entry)
            cuda.syncthreads()
        _choose(thread, slot, (count, nodes), (tokens, scores, parents, ranks), draft_nodes, draft_parents)

    return Kernel(f"grow_block_tree_{rows}_{first_row}_{top_k}_{nodes}", kernel, (types.int64,) * 4, THREADS)


def _make_enter(top_k: int) -> Any:
    """A device function that enters one draft of a level of a block."""

    @device_function
    def enter(child: Any, entry: Any, deeper: Any, first: Any, top_tokens: Any, top_logprobs: Any, shared: Any) -> None:
        tokens, scores, parents, best = shared
        row, rank = divide(child, top_k)
        parent, above = int64(-1), float32(0.0)
        if deeper:
            parent = int64(best[row])
            above = scores[parent]
        token = _known(above, int_at(top_tokens, first + rank))
        tokens[entry] = int32(token)
        scores[entry] = _score(above, _float_at(top_logprobs, first + rank), token)
        parents[entry] = int32(parent)

    return enter


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: a level, the choice after the last, and a block's tree."""
    return [_make_level(8, 8, 328, 3, 512), _make_choice(8, 8, 328, 32), _make_block(6, 1, 8, 32)]
