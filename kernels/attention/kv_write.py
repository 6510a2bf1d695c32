"""Keys and values stored to the paged caches in one launch: a block a row, dead rows nowhere.

The rows are a step's, of several slots, or those of a chunk of prefill. With scales they are stored as e4m3 codes.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.kv_codes import four_codes, load_scale
from lowlat.kernels.common.memory import byte_at, divide, int_at, threads_for, turns, wide_count
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types

__all__ = ["examples", "kv_write", "prefill_kv_write"]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    offsets: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> list[KernelCall]:
    """`kv_write` of the reference, whose arguments these are; row_live may be [B, R] too.

    k, v and the caches are of one dtype, in rows of whole multiples of 16 bytes; with kv_scales k and v are bf16 and
    the caches uint8. Raises ShapeError for shapes or dtypes that do not fit.
    """
    batch, rows = slots.shape[0], offsets.shape[0]
    check_shape("k", k, batch * rows, *k.shape[1:])
    check_shape("row_live", row_live.reshape(-1), batch * rows)
    check_shape("write_lens", write_lens, batch)
    sizes = _check_caches(k, v, k_cache, v_cache, kv_scales)
    kernel = _make(*sizes, rows, block_table.shape[1], kv_scales is not None)
    scales = 0 if kv_scales is None else kv_scales
    arguments = (k, v, row_live, block_table, slots, write_lens, offsets, k_cache, v_cache, scales)
    return [KernelCall(kernel, (batch * rows, 1, 1), arguments)]


def prefill_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    row_live: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> list[KernelCall]:
    """`prefill_kv_write` of the reference.

    k, v              [c, G, D]         the caches' dtype
    row_live          [c]               uint8
    block_table       [1, C / block]    int32
    chunk             [2]               int32  start, live rows; live row i is stored at position start + i
    kv_scales         [2, G]            float32: k and v are bf16 and the caches uint8, for codes
    k_cache, v_cache  [P, G, block, D]  updated; rows of whole multiples of 16 bytes
    Time: that of a launch, and 8 * c * G * D bytes over the memory's bandwidth in bf16. Captured: yes.
    Raises ShapeError for shapes or dtypes that do not fit.
    """
    rows = k.shape[0]
    check_shape("row_live", row_live, rows)
    check_shape("block_table", block_table, 1, block_table.shape[-1])
    check_shape("chunk", chunk, 2)
    kernel = _make(*_check_caches(k, v, k_cache, v_cache, kv_scales), 0, 0, kv_scales is not None)
    scales = 0 if kv_scales is None else kv_scales
    arguments = (k, v, row_live, block_table, chunk, 0, 0, k_cache, v_cache, scales)
    return [KernelCall(kernel, (rows, 1, 1), arguments)]


def _check_caches(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> tuple[int, int, int]:
    """KV heads, positions a block, and 16 bytes a row. Raises ShapeError."""
    rows, num_heads, dim = k.shape
    pages, _, block, _ = k_cache.shape
    check_shape("v", v, rows, num_heads, dim)
    for name, cache_ in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_shape(name, cache_, pages, num_heads, block, dim)
    wanted = k.dtype
    if kv_scales is not None:
        check_shape("kv_scales", kv_scales, 2, num_heads)
        wanted = torch.uint8
    if v.dtype != k.dtype or {k_cache.dtype, v_cache.dtype} != {wanted}:
        raise ShapeError(f"caches must have the dtype of keys and values, {k.dtype}, and uint8 with kv_scales")
    if kv_scales is not None and k.dtype != torch.bfloat16:
        raise ShapeError(f"codes are made of bfloat16, got {k.dtype}")
    parts = wide_count("k", k)
    for name, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        wide_count(name, tensor)
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
