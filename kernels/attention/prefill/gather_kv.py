"""This module copies the keys and values that a chunk of prefill sees from the paged caches to contiguous rows.

The chunk's start, read on the device, determines the positions. A thread copies 16 bytes of four keys and of four
values at a time; the work is proportional to the positions. Codes are decoded to bf16. The rows follow each other, or
are in a head's tiles of 128 or 64 positions in the layout of a warpgroup's products: halves of 64 columns, whose rows
of 128 bytes are swizzled.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.attention.prefill.gathered_rows import ALIGNMENT, tile_positions, tiles_shape
from lowlat.kernels.common.kv_codes import decode_in_order, load_multiplier
from lowlat.kernels.common.memory import divide, int_at, set_int, wide_count
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32

__all__ = ["examples", "first_gathered", "gather_kv"]

BATCH = 4  # places in flight in a thread
THREADS = 256
BLOCKS = 4  # an SM
ROW_BYTES = 128  # of a row of a half of a tile
TILED = 5  # dimensions of tiles


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
    gpu: Gpu,
    first: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> list[KernelCall]:
    """Copy positions [origin, start + size) of a slot, in one launch; positions without a live row become zero.

    k_cache, v_cache  [P, G, block, D]  rows of whole multiples of 16 bytes; block 0 may always be read. With kv_scales
                                        codes, and keys and values bf16
    block_table       [1, C / block]    int32
    chunk             [2]               int32  start, live rows; positions up to the last live one are in the table
    keys, values      [n, G, D]         out: row i is position origin + i; n >= `gathered_rows`; further rows stay. Or
                                        tiles as `tiles_shape` has them, the last 128 positions filled up with zeros
    lengths           [2, 2]            int32, out: (0, size) and (begin, start + size - origin), as flash attention
                                        takes the cumulative lengths of queries and of keys
    size              rows of the chunk; row i stands at position start + i
    window            positions that a row sees, its own included; None: all
    first             the first position that is seen: `begin` is it where the origin is 0, and 0 elsewhere
    kv_scales         [2, G]            float32; None: keys and values have the caches' dtype
    The origin is 0, or with a window the last multiple of ALIGNMENT below which no window reaches. So blocks of rows
    have the same positions for any start and size of a chunk.
    Time: 4 * (start + size - origin) * G * D * itemsize over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes or dtypes that do not fit.
    """
    pages, num_heads, block, dim = k_cache.shape
    check_shape("v_cache", v_cache, pages, num_heads, block, dim)
    check_shape("block_table", block_table, 1, block_table.shape[-1])
    check_shape("chunk", chunk, 2)
    check_shape("lengths", lengths, 2, 2)
    tiled = keys.ndim == TILED
    shape: tuple[int, ...] = (keys.shape[0], num_heads, dim)
    if tiled:
        shape = tiles_shape(keys.shape[1] * tile_positions(dim), num_heads, dim)
    for name, rows in (("keys", keys), ("values", values)):
        check_shape(name, rows, *shape)
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
    places = keys.numel() // dim * parts
    blocks = min(-(-places // (BATCH * THREADS)), BLOCKS * gpu.num_multiprocessors)
    scales = 0 if kv_scales is None else kv_scales
    arguments = (
        k_cache, v_cache, block_table, chunk, keys, values, lengths, size, window or 0, scales,
        keys.shape[1] if tiled else 0,
    )  # fmt: skip
    kernel = _make(num_heads, block, parts, first, kv_scales is not None, tiled)
    return [KernelCall(kernel, (blocks, 1, 1), arguments)]


@device_function
def first_gathered(start: Any, window: Any) -> Any:
    """Return the first position that is copied; a window of 0 means all positions."""
    below = max(start - (window - 1), int64(0))
    return below // int64(ALIGNMENT) * int64(ALIGNMENT) if window > 0 else int64(0)


@device_function
def _source(place: Any, origin: Any, end: Any, table: Any, sizes: Any) -> Any:
    """Return the offset of a place's 16 bytes in a cache, and whether they are a live row's; if not, one in block 0."""
    num_heads, block, parts = sizes
    row, part = divide(place, parts)
    index, head = divide(row, num_heads)
    position = origin + index
    alive = position < end
    number, offset = divide(position, block)
    page = int_at(table, number if alive else int64(0))
    page = page if alive else int64(0)
    return (((page * num_heads + head) * block + offset) * parts + part) * 16, alive


def _make_target(num_heads: int, pieces: int, tiled: bool) -> Any:
    """A device function that returns the target of a 16-byte piece, from the row's number, the piece, a head's tiles.

    A row's number counts the heads of a position first.
    """
    halves, tile_rows = pieces * 16 // ROW_BYTES, tile_positions(pieces * 8)

    @device_function
    def target(row: Any, piece: Any, tiles: Any) -> Any:
        if not tiled:
            return (row * int64(pieces) + piece) * int64(16)
        index, head = divide(row, num_heads)
        tile, within = divide(index, tile_rows)
        half = (head * tiles + tile) * int64(halves) + (piece >> int64(3))
        swizzled = (piece ^ within) & int64(7)
        return (half * int64(tile_rows) + within) * int64(ROW_BYTES) + swizzled * int64(16)

    return target


def _make_copy(sizes: tuple[int, int, int], tiled: bool) -> Any:
    """A device function that copies four places, `step` apart, all loads first; past the end the last place again."""
    target = _make_target(sizes[0], sizes[2], tiled)

    @device_function
    def store(place: Any, count: Any, alive: Any, words: Any, rows: Any, tiles: Any) -> None:
        zero = uint32(0)
        a, b, c, d = words
        if place < count:
            row, part = divide(place, sizes[2])
            at = rows + target(row, part, tiles)
            if alive:
                ptx.store_global_128(at, a, b, c, d)
            else:
                ptx.store_global_128(at, zero, zero, zero, zero)

    @device_function
    def copy_four(
        place: Any, step: Any, count: Any, origin: Any, end: Any, table: Any, pairs: Any, kv_scales: Any, tiles: Any
    ) -> None:
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
        store(place, count, alive0, k0, keys, tiles)
        store(p1, count, alive1, k1, keys, tiles)
        store(p2, count, alive2, k2, keys, tiles)
        store(p3, count, alive3, k3, keys, tiles)
        store(place, count, alive0, v0, values, tiles)
        store(p1, count, alive1, v1, values, tiles)
        store(p2, count, alive2, v2, values, tiles)
        store(p3, count, alive3, v3, values, tiles)

    return copy_four


def _make_decode(sizes: tuple[int, int, int], tiled: bool) -> Any:
    """A device function that decodes two places, `step` apart, of caches of codes, like `_make_copy` for four."""
    num_heads, _, parts = sizes
    target = _make_target(num_heads, 2 * parts, tiled)

    @device_function
    def store(place: Any, count: Any, alive: Any, words: Any, multiplier: Any, rows: Any, tiles: Any) -> None:
        """The numbers of 16 codes, 32 bytes."""
        zero = uint32(0)
        a, b, c, d = words
        if place < count:
            row, part = divide(place, parts)
            at = rows + target(row, part * int64(2), tiles)
            behind = rows + target(row, part * int64(2) + int64(1), tiles)
            if alive:
                a0, a1 = decode_in_order(a, multiplier)
                b0, b1 = decode_in_order(b, multiplier)
                ptx.store_global_128(at, a0, a1, b0, b1)
                c0, c1 = decode_in_order(c, multiplier)
                d0, d1 = decode_in_order(d, multiplier)
                ptx.store_global_128(behind, c0, c1, d0, d1)
            else:
                ptx.store_global_128(at, zero, zero, zero, zero)
                ptx.store_global_128(behind, zero, zero, zero, zero)

    @device_function
    def decode_two(
        place: Any, step: Any, count: Any, origin: Any, end: Any, table: Any, pairs: Any, kv_scales: Any, tiles: Any
    ) -> None:
        k_cache, v_cache, keys, values = pairs
        second = min(place + step, count - 1)
        s0, alive0 = _source(place, origin, end, table, sizes)
        s1, alive1 = _source(second, origin, end, table, sizes)
        k0, k1 = ptx.load_global_128(k_cache + s0), ptx.load_global_128(k_cache + s1)
        v0, v1 = ptx.load_global_128(v_cache + s0), ptx.load_global_128(v_cache + s1)
        row0, _ = divide(place, parts)
        row1, _ = divide(second, parts)
        _, head0 = divide(row0, num_heads)
        _, head1 = divide(row1, num_heads)
        store(place, count, alive0, k0, load_multiplier(kv_scales, head0), keys, tiles)
        store(place + step, count, alive1, k1, load_multiplier(kv_scales, head1), keys, tiles)
        store(place, count, alive0, v0, load_multiplier(kv_scales, head0 + num_heads), values, tiles)
        store(place + step, count, alive1, v1, load_multiplier(kv_scales, head1 + num_heads), values, tiles)

    return decode_two


@cache
def _make(num_heads: int, block: int, parts: int, first: int = 0, coded: bool = False, tiled: bool = False) -> Kernel:
    """A place is 16 bytes of a row of the cache; the grid takes places in turn until all are done."""
    batch, copy = 2 if coded else BATCH, (_make_decode if coded else _make_copy)((num_heads, block, parts), tiled)

    def gather_kv_kernel(
        k_cache: Any, v_cache: Any, table: Any, chunk: Any, keys: Any, values: Any, lengths: Any, size: Any,
        window: Any, kv_scales: Any, tiles: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        step = int64(cuda.gridDim.x) * int64(THREADS)
        start = int_at(chunk, int64(0))
        end, origin = start + int_at(chunk, int64(1)), first_gathered(start, window)
        seen = start + size - origin
        if place == 0:
            set_int(lengths, int64(0), int64(0))
            set_int(lengths, int64(1), size)
            set_int(lengths, int64(2), int64(first) if origin == 0 else int64(0))
            set_int(lengths, int64(3), seen)
        if tiled:  # what is after the last position in its tile, too
            seen = (seen + int64(ALIGNMENT - 1)) // int64(ALIGNMENT) * int64(ALIGNMENT)
        count = seen * int64(num_heads * parts)
        pairs = (k_cache, v_cache, keys, values)
        while place < count:
            copy(place, step, count, origin, end, table, pairs, kv_scales, tiles)
            place += step * batch

    name = f"gather_kv_{num_heads}_{block}_{parts}" + (f"_from{first}" if first else "") + ("_coded" if coded else "")
    name += "_tiled" if tiled else ""
    return Kernel(name, gather_kv_kernel, (types.int64,) * 11, THREADS, min_blocks=BLOCKS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: Llama-8B's and gpt-oss's caches, of one head, a draft model's, of codes."""
    plain = [_make(8, 32, 16), _make(8, 64, 8), _make(1, 16, 16), _make(8, 32, 16, 1), _make(8, 32, 8, 0, True)]
    wide = [_make(4, 32, 64, tiled=True), _make(4, 32, 32, coded=True, tiled=True)]
    return [*plain, _make(8, 32, 16, tiled=True), _make(8, 32, 8, coded=True, tiled=True), *wide]
