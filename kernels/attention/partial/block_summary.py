"""This module computes, by dimension, the largest and smallest key of each block of a list that has new keys."""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.kv_codes import decode_in_order, load_multiplier
from lowlat.kernels.common.memory import divide, int_at, wide_count
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.reference.attention import partial as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "summarise_blocks"]

THREADS = 256
BLOCKS = 2  # an SM


@launches_with(reference.summarise_blocks)
def summarise_blocks(given: Given, *, gpu: Gpu = H200) -> list[KernelCall]:
    """`summarise_blocks` of the reference, in one launch; a thread takes 8 dimensions of a block's keys at a time.

    Keys are bf16, or with kv_scales codes, in rows of whole multiples of 16 bytes; summaries are bf16.
    Time: a read of the new blocks' keys over the memory's bandwidth. Captured: yes. Raises ShapeError for arguments
    that do not fit.
    """
    k_cache, key_summary, kv_scales = given["k_cache"], given["key_summary"], given.arrays.get("kv_scales")
    num_heads, block, parts, table_width = given.sizes("G", "block", "parts", "blocks")
    held = torch.bfloat16 if kv_scales is None else torch.uint8
    if (k_cache.dtype, key_summary.dtype) != (held, torch.bfloat16) or parts < 1 or block % parts:
        raise ShapeError(
            f"summarise_blocks takes bfloat16, or codes with kv_scales, and whole parts of a block of {block}, got "
            f"{k_cache.dtype}, {parts} parts"
        )
    wide_count("k_cache", k_cache)
    pieces = wide_count("key_summary", key_summary)
    most = -(-table_width * parts * num_heads * pieces // THREADS)
    grid = (min(most, BLOCKS * gpu.num_multiprocessors), 1, 1)
    kernel = _make(num_heads, block, parts, pieces, kv_scales is not None)
    return [KernelCall(kernel, grid, given.take("k_cache", "block_table", "span", "key_summary", "kv_scales"))]


@device_function
def _greater(words: Any, others: Any) -> Any:
    """The greater of each of the 8 bf16 in four words and of those in four others."""
    a, b, c, d = words
    e, f, g, h = others
    return _greater_pair(a, e), _greater_pair(b, f), _greater_pair(c, g), _greater_pair(d, h)


@device_function
def _greater_pair(word: Any, other: Any) -> Any:
    low, high = max(low_value(word), low_value(other)), max(high_value(word), high_value(other))
    return ptx.bf16_pair(float32(low), float32(high))


@device_function
def _negated(words: Any) -> Any:
    """The 8 bf16 in four words with their signs changed."""
    a, b, c, d = words
    signs = uint32(0x80008000)
    return uint32(a ^ signs), uint32(b ^ signs), uint32(c ^ signs), uint32(d ^ signs)


def _make_load(coded: bool) -> Any:
    """A function: 8 numbers of a key, as four words of two bf16."""

    @device_function
    def load(address: Any, multiplier: Any) -> Any:
        if coded:
            first, second = ptx.load_global_64(address)
            a, b = decode_in_order(first, multiplier)
            c, d = decode_in_order(second, multiplier)
            return a, b, c, d
        return ptx.load_global_128(address)

    return load


@cache
def _make(num_heads: int, block: int, parts: int, pieces: int, coded: bool = False) -> Kernel:
    """A place is 16 bytes of a summary; the grid takes places in turn until all are done."""
    size, piece_bytes, load = block // parts, 8 if coded else 16, _make_load(coded)

    def summarise_blocks_kernel(k_cache: Any, table: Any, span: Any, summary: Any, kv_scales: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        end = int_at(span, int64(1))
        first = int_at(span, int64(0)) // int64(size)
        count = ((end + int64(size - 1)) // int64(size) - first) * int64(num_heads * pieces)
        while place < count:
            row, piece = divide(place, pieces)
            number, head = divide(row, num_heads)
            index, part = divide(first + number, parts)
            owner = int_at(table, index) * num_heads + head
            source = k_cache + ((owner * block + part * size) * pieces + piece) * piece_bytes
            held = min(int64(size), end - (first + number) * int64(size))
            multiplier = load_multiplier(kv_scales, head) if coded else uint32(0)
            largest = load(source, multiplier)
            smallest = _negated(largest)
            for step in range(1, held):
                words = load(source + step * int64(pieces * piece_bytes), multiplier)
                largest, smallest = _greater(largest, words), _greater(smallest, _negated(words))
            target = summary + ((owner * parts + part) * (2 * pieces) + piece) * 16
            a, b, c, d = largest
            ptx.store_global_128(target, a, b, c, d)
            e, f, g, h = _negated(smallest)
            ptx.store_global_128(target + pieces * 16, e, f, g, h)
            place += int64(cuda.gridDim.x) * int64(THREADS)

    name = f"summarise_blocks_{num_heads}_{block}_{parts}_{pieces}" + ("_coded" if coded else "")
    return Kernel(name, summarise_blocks_kernel, (types.int64,) * 5, THREADS, min_blocks=BLOCKS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: Llama-8B's cache with blocks of 16, and of codes."""
    return [_make(8, 32, 2, 16), _make(8, 32, 2, 16, True)]
