"""Keys and values of the positions that a chunk of prefill sees, copied from the paged caches to rows side by side.

Which positions those are is told by the chunk's start, read on the device. A thread copies 16 bytes of four keys and of
four values at a time; the work is in proportion to what is seen. Codes become the numbers that everybody reads. It
knows nothing of what attention makes of the rows.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.attention.gathered_rows import ALIGNMENT
from lowlat.kernels.common.kv_codes import decode_in_order, load_multiplier
from lowlat.kernels.common.memory import divide, int_at, set_int, wide_count
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Card, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32

__all__ = ["examples", "gather_kv"]

BATCH = 4  # places under way in a thread
THREADS = 256
BLOCKS = 4  # a multiprocessor


def gather_kv(
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    size: int,
    window: int | None,
    card: Card,
    first: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> list[KernelCall]:
    """Copy positions [origin, start + size) of a slot, in one launch; those of no live row become zero.

    k_cache, v_cache  [P, G, block, D]  rows of whole multiples of 16 bytes; block 0 may always be read. With kv_scales
                                        codes, and keys and values bf16
    block_table       [1, C / block]    int32
    chunk             [2]               int32  start, live rows; positions up to the last live one are in the table
    keys, values      [n, G, D]         out: row i is position origin + i; n >= `gathered_rows`; further rows stay
    lengths           [2, 2]            int32, out: (0, size) and (begin, start + size - origin), as flash attention
                                        takes the cumulative lengths of queries and of keys
    size              rows of the chunk; row i stands at position start + i
    window            positions that a row sees, its own included; None: all
    first             the first position that is seen: `begin` is it where the origin is 0, and 0 elsewhere
    kv_scales         [2, G]            float32; None: keys and values have the caches' dtype
    The origin is 0, or with a window the last multiple of ALIGNMENT that no window reaches below: so blocks of rows
    hold the same positions wherever a chunk starts, and whatever its size.
    Time: 4 * (start + size - origin) * G * D * itemsize over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes or dtypes that do not fit.
    """
    pages, num_heads, block, dim = k_cache.shape
    check_shape("v_cache", v_cache, pages, num_heads, block, dim)
    check_shape("block_table", block_table, 1, block_table.shape[-1])
    check_shape("chunk", chunk, 2)
    check_shape("lengths", lengths, 2, 2)
    for name, rows in (("keys", keys), ("values", values)):
        check_shape(name, rows, keys.shape[0], num_heads, dim)
    held, made = k_cache.dtype, k_cache.dtype
    if kv_scales is not None:
        check_shape("kv_scales", kv_scales, 2, num_heads)
        held, made = torch.uint8, torch.bfloat16
    if {k_cache.dtype, v_cache.dtype} != {held} or {keys.dtype, values.dtype} != {made}:
        raise ShapeError(
            f"keys and values must have the caches' dtype {k_cache.dtype}, or be bf16 of codes by kv_scales"
        )
    parts = wide_count("k_cache", k_cache)
    for name, rows in (("v_cache", v_cache), ("keys", keys), ("values", values)):
        wide_count(name, rows)
    blocks = min(-(-keys.shape[0] * num_heads * parts // (BATCH * THREADS)), BLOCKS * card.num_multiprocessors)
    scales = 0 if kv_scales is None else kv_scales
    arguments = (k_cache, v_cache, block_table, chunk, keys, values, lengths, size, window or 0, scales)
    kernel = _make(num_heads, block, parts, first, kv_scales is not None)
    return [KernelCall(kernel, (blocks, 1, 1), arguments)]


@device_function
def _origin(start: Any, window: Any) -> Any:
    """The first position that is copied; a window of 0 holds all."""
    below = max(start - (window - 1), int64(0))
    return below // int64(ALIGNMENT) * int64(ALIGNMENT) if window > 0 else int64(0)


@device_function
def _source(place: Any, origin: Any, end: Any, table: Any, sizes: Any) -> Any:
    """Where the 16 bytes of a place lie in a cache, and whether they are a live row's; else somewhere in block 0."""
    num_heads, block, parts = sizes
    row, part = divide(place, parts)
    index, head = divide(row, num_heads)
    position = origin + index
    alive = position < end
    number, offset = divide(position, block)
    page = int_at(table, number if alive else int64(0))
    page = page if alive else int64(0)
    return (((page * num_heads + head) * block + offset) * parts + part) * 16, alive


@device_function
def _store(place: Any, count: Any, alive: Any, words: Any, rows: Any) -> None:
    zero = uint32(0)
    a, b, c, d = words
    if place < count:
        if alive:
            ptx.store_global_128(rows + place * 16, a, b, c, d)
        else:
            ptx.store_global_128(rows + place * 16, zero, zero, zero, zero)


@device_function
def _store_numbers(place: Any, count: Any, alive: Any, words: Any, multiplier: Any, rows: Any) -> None:
    """The numbers of 16 codes, 32 bytes."""
    zero = uint32(0)
    a, b, c, d = words
    if place < count:
        if alive:
            a0, a1 = decode_in_order(a, multiplier)
            b0, b1 = decode_in_order(b, multiplier)
            ptx.store_global_128(rows + place * 32, a0, a1, b0, b1)
            c0, c1 = decode_in_order(c, multiplier)
            d0, d1 = decode_in_order(d, multiplier)
            ptx.store_global_128(rows + place * 32 + 16, c0, c1, d0, d1)
        else:
            ptx.store_global_128(rows + place * 32, zero, zero, zero, zero)
            ptx.store_global_128(rows + place * 32 + 16, zero, zero, zero, zero)


@device_function
def _decode_two(
    place: Any, step: Any, count: Any, origin: Any, end: Any, table: Any, sizes: Any, pairs: Any, kv_scales: Any
) -> None:
    """Two places, `step` apart, of caches of codes, as `_copy_four` has four."""
    k_cache, v_cache, keys, values = pairs
    num_heads, _, parts = sizes
    second = min(place + step, count - 1)
    s0, alive0 = _source(place, origin, end, table, sizes)
    s1, alive1 = _source(second, origin, end, table, sizes)
    k0, k1 = ptx.load_global_128(k_cache + s0), ptx.load_global_128(k_cache + s1)
    v0, v1 = ptx.load_global_128(v_cache + s0), ptx.load_global_128(v_cache + s1)
    row0, _ = divide(place, parts)
    row1, _ = divide(second, parts)
    _, head0 = divide(row0, num_heads)
    _, head1 = divide(row1, num_heads)
    _store_numbers(place, count, alive0, k0, load_multiplier(kv_scales, head0), keys)
    _store_numbers(place + step, count, alive1, k1, load_multiplier(kv_scales, head1), keys)
    _store_numbers(place, count, alive0, v0, load_multiplier(kv_scales, head0 + num_heads), values)
    _store_numbers(place + step, count, alive1, v1, load_multiplier(kv_scales, head1 + num_heads), values)


@device_function
def _copy_four(place: Any, step: Any, count: Any, origin: Any, end: Any, table: Any, sizes: Any, pairs: Any) -> None:
    """Four places, `step` apart: all loads come before the stores; a place past the end stands for the last one."""
    k_cache, v_cache, keys, values = pairs
    p1, p2, p3 = place + step, place + 2 * step, place + 3 * step
    last = count - 1
    s0, alive0 = _source(place, origin, end, table, sizes)
    s1, alive1 = _source(min(p1, last), origin, end, table, sizes)
    s2, alive2 = _source(min(p2, last), origin, end, table, sizes)
    s3, alive3 = _source(min(p3, last), origin, end, table, sizes)
    k0, k1 = ptx.load_global_128(k_cache + s0), ptx.load_global_128(k_cache + s1)
    k2, k3 = ptx.load_global_128(k_cache + s2), ptx.load_global_128(k_cache + s3)
    v0, v1 = ptx.load_global_128(v_cache + s0), ptx.load_global_128(v_cache + s1)
    v2, v3 = ptx.load_global_128(v_cache + s2), ptx.load_global_128(v_cache + s3)
    _store(place, count, alive0, k0, keys)
    _store(p1, count, alive1, k1, keys)
    _store(p2, count, alive2, k2, keys)
    _store(p3, count, alive3, k3, keys)
    _store(place, count, alive0, v0, values)
    _store(p1, count, alive1, v1, values)
    _store(p2, count, alive2, v2, values)
    _store(p3, count, alive3, v3, values)


@cache
def _make(num_heads: int, block: int, parts: int, first: int = 0, coded: bool = False) -> Kernel:
    """A place is 16 bytes of a row of the cache; the grid takes places in turn until all are done."""
    sizes = (num_heads, block, parts)

    def gather_kv_kernel(
        k_cache: Any, v_cache: Any, table: Any, chunk: Any, keys: Any, values: Any, lengths: Any, size: Any,
        window: Any, kv_scales: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        step = int64(cuda.gridDim.x) * int64(THREADS)
        start = int_at(chunk, int64(0))
        end, origin = start + int_at(chunk, int64(1)), _origin(start, window)
        seen = start + size - origin
        if place == 0:
            set_int(lengths, int64(0), int64(0))
            set_int(lengths, int64(1), size)
            set_int(lengths, int64(2), int64(first) if origin == 0 else int64(0))
            set_int(lengths, int64(3), seen)
        count = seen * int64(num_heads * parts)
        pairs = (k_cache, v_cache, keys, values)
        while place < count:
            if coded:
                _decode_two(place, step, count, origin, end, table, sizes, pairs, kv_scales)
                place += step * 2
            else:
                _copy_four(place, step, count, origin, end, table, sizes, pairs)
                place += step * BATCH

    name = f"gather_kv_{num_heads}_{block}_{parts}" + (f"_from{first}" if first else "") + ("_coded" if coded else "")
    return Kernel(name, gather_kv_kernel, (types.int64,) * 10, THREADS, min_blocks=BLOCKS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: Llama-8B's and gpt-oss's caches, of one head, a draft model's, of codes."""
    return [_make(8, 32, 16), _make(8, 64, 8), _make(1, 16, 16), _make(8, 32, 16, 1), _make(8, 32, 8, 0, True)]
