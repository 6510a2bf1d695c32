"""This module moves a tree's accepted rows of K and V to the dense tail, of one layer or all, in one launch.

A thread moves the same 16 bytes of a row from place to place, in order; so no barrier is needed.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import divide, int_at, long_at, threads_for, wide_count
from lowlat.kernels.reference.attention import kv as reference
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types

__all__ = ["examples", "kv_compact", "kv_compact_layer"]

BATCH = 4  # rows in flight in a thread


def kv_compact(
    accepted_nodes: torch.Tensor,
    commit_lens: torch.Tensor,
    dense_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    workspace: Workspace,
    group: str = "",
) -> list[KernelCall]:
    """Launch `kv_compact` of the reference for every layer of one block table.

    accepted_nodes      [B, T]                  int32  a path from the root; nodes ascend
    commit_lens         [B]                     int32  rows to keep
    dense_lens          [B]                     int32  position of the root
    block_table         [max B, blocks]         int32
    slots               [B]                     int32  -1 pads
    k_caches, v_caches  L times [P, G, block, D]       updated; one shape, rows of whole multiples of 16 bytes
    group  a name for these layers. The addresses of their caches are stored here in a workspace of that name, which
           launches over other layers must not share
    Raises ShapeError for shapes that do not fit.
    """
    caches = [*k_caches, *v_caches]
    for cache_ in caches:
        check_shape("a cache", cache_, *caches[0].shape)
        if cache_.dtype != caches[0].dtype or not cache_.is_contiguous():
            raise ShapeError("the caches of all layers must be contiguous and of one dtype")
    addresses = workspace(f"kv_compact.addresses.{group}", (len(caches),), torch.int64)
    addresses.copy_(torch.tensor([cache_.data_ptr() for cache_ in caches], dtype=torch.int64))
    reads = (accepted_nodes, commit_lens, dense_lens, block_table, slots)
    return _calls(reads, caches[0], (addresses, 0), len(caches))


@launches(reference.kv_compact)
def kv_compact_layer(given: Given) -> list[KernelCall]:
    """`kv_compact` of the reference, of one layer. Raises ShapeError for arguments that do not fit."""
    k_cache, v_cache = given["k_cache"], given["v_cache"]
    if v_cache.dtype != k_cache.dtype or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ShapeError("k_cache and v_cache must be contiguous and of one dtype")
    wide_count("v_cache", v_cache)
    reads = tuple(given[name] for name in ("accepted_nodes", "commit_lens", "dense_lens", "block_table", "slots"))
    return _calls(reads, k_cache, (k_cache, v_cache), 0)


def _calls(
    reads: tuple[torch.Tensor, ...], cache_: torch.Tensor, targets: tuple[Argument, Argument], listed: int
) -> list[KernelCall]:
    """Make the launch over the listed caches; without a list, over the two targets themselves."""
    (batch, rows), table_width = reads[0].shape, reads[3].shape[1]
    for array in (reads[1], reads[2], reads[4]):
        check_shape("commit_lens, dense_lens and slots", array, batch)
    _, num_heads, block, _ = cache_.shape
    kernel = _make(rows, num_heads, block, wide_count("a cache", cache_), table_width, listed > 0)
    return [KernelCall(kernel, (listed or 2, batch, 1), (*reads, *targets))]


@device_function
def _row(position: Any, head: Any, part: Any, sizes: Any, table: Any) -> Any:
    """Return the byte offset in a cache of a thread's part of the row at a position."""
    num_heads, block, parts = sizes
    number, offset = divide(position, block)
    return (((int_at(table, number) * num_heads + head) * block + offset) * parts + part) * 16


@device_function
def _store(address: Any, row: Any) -> None:
    ptx.store_global_128(address, row[0], row[1], row[2], row[3])


@device_function
def _place(place: Any, count: Any, nodes: Any) -> Any:
    """Return a place that must move, with its node; past the end a place that stays."""
    node = int_at(nodes, min(place, count - 1))
    return node if place < count else place


@device_function
def _move_four(base: Any, place: Any, moving: Any, head: Any, part: Any, sizes: Any, table: Any, cache_: Any) -> None:
    """Move four rows at once. Sources are never below their targets, so all loads may come before the stores.

    For a row that stays the root's row is loaded, and nothing is stored.
    """
    n0, n1, n2, n3 = moving
    moves0, moves1, moves2, moves3 = n0 != place, n1 != place + 1, n2 != place + 2, n3 != place + 3
    p0, p1 = place if moves0 else int64(0), place + 1 if moves1 else int64(0)
    p2, p3 = place + 2 if moves2 else int64(0), place + 3 if moves3 else int64(0)
    s0 = _row(base + (n0 if moves0 else int64(0)), head, part, sizes, table)
    s1 = _row(base + (n1 if moves1 else int64(0)), head, part, sizes, table)
    s2 = _row(base + (n2 if moves2 else int64(0)), head, part, sizes, table)
    s3 = _row(base + (n3 if moves3 else int64(0)), head, part, sizes, table)
    t0, t1 = _row(base + p0, head, part, sizes, table), _row(base + p1, head, part, sizes, table)
    t2, t3 = _row(base + p2, head, part, sizes, table), _row(base + p3, head, part, sizes, table)
    first, second = ptx.load_global_128(cache_ + s0), ptx.load_global_128(cache_ + s1)
    third, fourth = ptx.load_global_128(cache_ + s2), ptx.load_global_128(cache_ + s3)
    if moves0:
        _store(cache_ + t0, first)
    if moves1:
        _store(cache_ + t1, second)
    if moves2:
        _store(cache_ + t2, third)
    if moves3:
        _store(cache_ + t3, fourth)


@cache
def _make(rows: int, num_heads: int, block: int, parts: int, table_width: int, listed: bool) -> Kernel:
    """listed: the first target is a list of caches; else the two targets are the caches."""
    num_parts = num_heads * parts
    threads = threads_for(num_parts)
    sizes = (num_heads, block, parts)

    def kernel(
        accepted_nodes: Any,
        commit_lens: Any,
        dense_lens: Any,
        block_table: Any,
        slots: Any,
        first: Any,
        second: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index = int64(cuda.blockIdx.y)
        slot, count = int_at(slots, index), int_at(commit_lens, index)
        base, cache_ = int_at(dense_lens, index), first if cuda.blockIdx.x == 0 else second
        if listed:
            cache_ = long_at(first, int64(cuda.blockIdx.x))
        nodes = accepted_nodes + index * (rows * 4)
        table = block_table + max(slot, int64(0)) * (table_width * 4)
        unit = int64(cuda.threadIdx.x)
        while slot >= 0 and unit < num_parts:
            head, part = divide(unit, parts)
            place = int64(1)  # the root never moves
            while place < count:
                n0, n1 = _place(place, count, nodes), _place(place + 1, count, nodes)
                n2, n3 = _place(place + 2, count, nodes), _place(place + 3, count, nodes)
                if n0 != place or n1 != place + 1 or n2 != place + 2 or n3 != place + 3:
                    _move_four(base, place, (n0, n1, n2, n3), head, part, sizes, table, cache_)
                place += BATCH
            unit += threads

    name = f"kv_compact_{rows}_{num_heads}_{block}_{parts}_{table_width}_{'listed' if listed else 'layer'}"
    return Kernel(name, kernel, (types.int64,) * 7, threads)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: Llama-8B's and gpt-oss's caches, and one layer."""
    return [_make(64, 8, 32, 16, 1028, True), _make(16, 8, 64, 8, 520, True), _make(64, 8, 32, 16, 1028, False)]
