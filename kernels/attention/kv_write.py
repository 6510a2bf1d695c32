"""This module stores keys and values to the paged caches in one launch, a block a row; dead rows are not stored.

The rows are a step's, of several slots, or those of a chunk of prefill. With scales they are stored as e4m3 codes.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.kv_codes import four_codes, load_scale
from lowlat.kernels.common.memory import byte_at, divide, int_at, threads_for, turns, wide_count
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.reference.attention import kv as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types

__all__ = ["examples", "kv_write", "prefill_kv_write"]


@launches(reference.kv_write)
def kv_write(given: Given) -> list[KernelCall]:
    """Launch `kv_write` of the reference; row_live may be [B, R], too.

    k, v and the caches are of one dtype, in rows of whole multiples of 16 bytes; with kv_scales k and v are bf16 and
    the caches uint8. Raises ShapeError for other dtypes and rows.
    """
    batch, rows, table_width = given.sizes("B", "R", "blocks")
    kernel = _make(*_cache_sizes(given), rows, table_width, "kv_scales" in given.arrays)
    names = ("k", "v", "row_live", "block_table", "slots", "write_lens", "offsets", "k_cache", "v_cache", "kv_scales")
    return [KernelCall(kernel, (batch * rows, 1, 1), given.take(*names))]


@launches(reference.prefill_kv_write)
def prefill_kv_write(given: Given) -> list[KernelCall]:
    """Launch `prefill_kv_write` of the reference, with the dtypes of `kv_write`.

    Time: that of a launch, and 8 * c * G * D bytes over the memory's bandwidth in bf16. Captured: yes.
    """
    kernel = _make(*_cache_sizes(given), 0, 0, "kv_scales" in given.arrays)
    arguments = (*given.take("k", "v", "row_live", "block_table", "chunk"), 0, 0)
    caches = given.take("k_cache", "v_cache", "kv_scales")
    return [KernelCall(kernel, (given["k"].shape[0], 1, 1), (*arguments, *caches))]


def _cache_sizes(given: Given) -> tuple[int, int, int]:
    """Return the KV heads, the positions of a block, and the 16-byte pieces of a row. Raises ShapeError."""
    k, codes = given["k"], "kv_scales" in given.arrays
    wanted = torch.uint8 if codes else k.dtype
    if {given["k_cache"].dtype, given["v_cache"].dtype} != {wanted}:
        raise ShapeError(f"caches must have the dtype of keys and values, {k.dtype}, and uint8 with kv_scales")
    if codes and k.dtype != torch.bfloat16:
        raise ShapeError(f"codes are made of bfloat16, got {k.dtype}")
    *_, parts = (wide_count(name, given[name]) for name in ("v", "k_cache", "v_cache", "k"))
    num_heads, block = given.sizes("G", "block")
    return num_heads, block, parts


@cache
def _make(num_heads: int, block: int, parts: int, rows: int, table_width: int, coded: bool = False) -> Kernel:
    """Grid (M,). rows: of a slot, whose table has `table_width` entries; 0: a chunk's rows.

    origin  the slots of a step, or a chunk's start
    """
    count = num_heads * parts
    threads, part_bytes = threads_for(count), 8 if coded else 16

    def kv_write_kernel(
        k: Any,
        v: Any,
        row_live: Any,
        table: Any,
        origin: Any,
        write_lens: Any,
        offsets: Any,
        k_cache: Any,
        v_cache: Any,
        kv_scales: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        if byte_at(row_live, row) == 0:
            return
        if rows > 0:
            owner, own = divide(row, rows)
            position = int_at(write_lens, owner) + int_at(offsets, own)
            first = int_at(origin, owner) * table_width
        else:
            position, first = int_at(origin, int64(0)) + row, int64(0)
        number, offset = divide(position, block)
        page = int_at(table, first + number)
        for turn in range(turns(count, threads)):
            place = int64(cuda.threadIdx.x) + turn * threads
            if place < count:
                head, part = divide(place, parts)
                source = (row * count + place) * 16
                target = (((page * num_heads + head) * block + offset) * parts + part) * part_bytes
                a0, a1, a2, a3 = ptx.load_global_128(k + source)
                b0, b1, b2, b3 = ptx.load_global_128(v + source)
                if coded:
                    own, other = load_scale(kv_scales, head), load_scale(kv_scales, head + num_heads)
                    ptx.store_global_64(k_cache + target, _codes(a0, a1, own), _codes(a2, a3, own))
                    ptx.store_global_64(v_cache + target, _codes(b0, b1, other), _codes(b2, b3, other))
                else:
                    ptx.store_global_128(k_cache + target, a0, a1, a2, a3)
                    ptx.store_global_128(v_cache + target, b0, b1, b2, b3)

    kind = f"kv_write_{rows}_{table_width}" if rows else "prefill_kv_write"
    name = f"{kind}_{num_heads}_{block}_{parts}" + ("_coded" if coded else "")
    return Kernel(name, kv_write_kernel, (types.int64,) * 10, threads)


@device_function
def _codes(first: Any, second: Any, scale: Any) -> Any:
    """The codes of two pairs of bf16."""
    return four_codes(low_value(first), high_value(first), low_value(second), high_value(second), scale)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: Llama-8B's and gpt-oss's caches, one of a single head, a step's rows, codes."""
    plain = [
        _make(8, 32, 16, 0, 0),
        _make(8, 64, 8, 0, 0),
        _make(1, 16, 16, 0, 0),
        _make(8, 32, 16, 4, 1028),
        _make(2, 32, 32, 0, 0),
    ]
    return [*plain, _make(8, 32, 16, 0, 0, True)]
