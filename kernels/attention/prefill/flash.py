"""This module has flash attention of a prompt's rows by warpgroups' tensor cores, for GPUs of capability 9.0.

A block has 128 or 64 rows of a head, 64 a warpgroup, and one more warp that copies. Keys and values are in tiles of 128
positions, or of 64 for heads wider than 128, see `gather_kv`. A block takes the tiles that its rows see, the last one
first. While a warpgroup makes weights of its scores, the tensor cores multiply its weights and values of the previous
tile, and the other warpgroup's products.

For heads of 512 both warpgroups have the same 64 rows, and each has the sums of half of the dimensions. Both compute
all scores. That is half as many products again, but neither waits for the other.

Tiles are at multiples of their size from position 0. A tile of which a row sees nothing adds zeros to its sums, or
scales them by one. So a row's bits depend on its own position and the positions that it sees alone, not on a launch's
other rows.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.attention.prefill.gather_kv import first_gathered
from lowlat.kernels.attention.prefill.gathered_rows import HALF, tile_positions, tiles_shape
from lowlat.kernels.attention.prefill.softmax import GROUP_ROWS, make_copy, make_finish, make_multiply, make_place
from lowlat.kernels.common.memory import int_at
from lowlat.kernels.common.pipeline import BARRIER_BYTES, make_pipeline
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.kernel import H200, HOPPER, Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["GROUPS", "examples", "has_prefill_flash", "prefill_flash"]

DIMS = (64, 128, 256, 512)
GROUPS = (1, 2)  # warpgroups of a block that multiply
MAX_SUMS = 256  # dimensions for whose sums a warpgroup has registers: of wider heads two have the same rows
STAGES = {64: 3, 128: 3, 256: 2, 512: 1}
REGISTERS = {1: (40, 216), 2: (24, 240)}  # of a thread that copies, and of one that multiplies, by warpgroups of these
BLOCKS = {1: 2, 2: 1}  # that share an SM, where their memory allows it
WIDE = 256  # numbers of a head whose memory allows no two
WIDE_REGISTERS = (40, 240)
SHORT = 512  # positions of a window that is short
SWIZZLE_BYTES = 1024
LOG2_E = 1.4426950408889634


def has_prefill_flash(gpu: Gpu, dim: int) -> bool:
    """Return whether a GPU has the instructions, and the kernel takes heads of this size."""
    return gpu.capability == HOPPER and dim in DIMS


def prefill_flash(
    *,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: torch.Tensor,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    window: int | None = None,
    first: int = 0,
    scale: float,
    gpu: Gpu,
    softcap: float | None = None,
    groups: int | None = None,
    arranged: bool = False,
) -> list[KernelCall]:
    """Compute causal attention of c rows in one launch, accumulated in float32, weights rounded to bf16.

    q             [c, H, D]                   bf16, D one of DIMS; row i is at position start + i
    keys, values  [G, tiles, D / 64, n, 64]   bf16, as `gather_kv` stores them for the same chunk, window and size; n is
                                              `tile_positions`
    chunk         [2]                         int32: start, live rows; only start is read
    sinks         [H]                         bf16 or float32: one more score a head, without a value; None: none
    out           [c, H, D] or [c, H * D]     bf16, out; a row that sees nothing is zero; arranged: as `arrange` leaves
                                              it, [H * D / 64, c, 64]
    window        positions that a row sees, its own included; None: all
    first         the first visible position
    scale         above 0: scores are multiplied by it
    softcap       c: scaled scores s become c tanh(s / c); None: they stay
    groups        one of GROUPS; no bit depends on it; None: by the shape. Heads of 512 need 2
    arranged      the result's rows are stored as a prefill GEMM reads them
    Time: 4 * H * D times what rows see, in whole tiles, over the tensor cores' rate. Captured: yes.
    Raises ShapeError for shapes, dtypes or a scale that do not fit.
    """
    rows, heads, dim = q.shape
    num_heads = keys.shape[0]
    if dim not in DIMS or heads % num_heads:
        raise ShapeError(f"heads must be of {DIMS} numbers, and {heads} heads of queries share {num_heads} of keys")
    for name, tensor in (("keys", keys), ("values", values)):
        check_shape(name, tensor, *tiles_shape(keys.shape[1] * tile_positions(dim), num_heads, dim))
    check_shape("chunk", chunk, 2)
    if arranged:
        check_shape("out", out, *arranged_shape(rows, heads * dim))
    else:
        check_shape("out", out, rows, *((heads, dim) if out.dim() == q.dim() else (heads * dim,)))
    if {each.dtype for each in (q, keys, values, out)} != {torch.bfloat16}:
        raise ShapeError(f"attention of prefill is of bf16, got {q.dtype}, {keys.dtype}, {values.dtype}, {out.dtype}")
    if not q.is_contiguous() or not out.is_contiguous() or not scale > 0:
        raise ShapeError(f"queries and results must lie row by row, and the scale {scale} be above 0")
    sink_bytes = 0
    if sinks is not None:
        check_shape("sinks", sinks, heads)
        if sinks.dtype not in (torch.bfloat16, torch.float32):
            raise ShapeError(f"sinks must be bfloat16 or float32, got {sinks.dtype}")
        sink_bytes = sinks.element_size()
    if groups is None:
        groups = 2 if dim > MAX_SUMS else _groups_of(rows, heads, window, gpu)
    if groups not in GROUPS or (dim > MAX_SUMS and groups != 2):
        raise ShapeError(f"a block has {GROUPS} warpgroups that multiply, 2 of heads of {dim}, got {groups}")
    kernel = _make(heads, num_heads, dim, sink_bytes, groups, arranged, softcap)
    block_rows = GROUP_ROWS if dim > MAX_SUMS else groups * GROUP_ROWS
    arguments = (
        q, keys, values, chunk, 0 if sinks is None else sinks, out, rows, keys.shape[1], window or 0, first,
        scale * LOG2_E,
    )  # fmt: skip
    return [KernelCall(kernel, (-(-rows // block_rows) * heads, 1, 1), arguments)]


def _groups_of(rows: int, heads: int, window: int | None, gpu: Gpu) -> int:
    """Return 1 if blocks of two warpgroups would leave SMs idle, or would have too little work each; else 2."""
    few = -(-rows // (2 * GROUP_ROWS)) * heads < gpu.num_multiprocessors
    return 1 if few or (window is not None and window <= SHORT) else 2


def _make_seen_tiles(keys: int) -> Any:
    """A device function that finds the tiles of `keys` positions that rows from `begin` to `end` see.

    It returns the last tile, their number, and the first tile of the keys.
    """

    @device_function
    def seen_tiles(start: Any, begin: Any, end: Any, window: Any, first: Any) -> Any:
        origin = first_gathered(start, window) // int64(keys)
        low = int64(start + begin)
        high = int64(start + end) - int64(1)
        lowest = max(low - (window - int64(1)), int64(0)) if window > int64(0) else int64(0)
        lowest = min(max(lowest, first), high)
        last = high // int64(keys)
        return uint32(last), uint32(uint32(last - lowest // int64(keys)) + uint32(1)), uint32(origin)

    return seen_tiles


@cache
def _make(
    heads: int, num_heads: int, dim: int, sink_bytes: int, groups: int, arranged: bool = False,
    softcap: float | None = None,
) -> Kernel:  # fmt: skip
    """Make the kernel. Its grid has the heads of 64 rows a warpgroup, or of both; last rows, which see most, first."""
    keys_a_tile, stages = tile_positions(dim), STAGES[dim]
    shared, tile_bytes = heads // num_heads, keys_a_tile * dim * 2
    parts = -(-dim // MAX_SUMS)  # of a head, by warpgroup
    sums_dim, groups_of_rows = dim // parts, groups // parts
    block_rows, area = groups_of_rows * GROUP_ROWS, stages * tile_bytes
    queries_bytes = block_rows * dim * 2
    pipeline = make_pipeline(stages, 1, 4 * groups, suspends=True)
    begin, barriers_at = pipeline.begin, queries_bytes + 2 * area
    place_queries = make_place(parts * heads, sums_dim, parts > 1)
    copy_tiles = make_copy(tile_bytes, pipeline, area)
    alone = groups == 1 and dim >= WIDE
    first_copying, (kept, wanted) = 4 * groups, WIDE_REGISTERS if alone else REGISTERS[groups]
    give, take = ptx_hopper.give_registers(kept), ptx_hopper.take_registers(wanted)
    multiply = make_multiply(dim, keys_a_tile, pipeline, area, parts, softcap)
    finish = make_finish(parts * heads, sums_dim, sink_bytes, arranged, parts)
    group_bytes = GROUP_ROWS * sums_dim * 2
    seen_tiles, split, capped = _make_seen_tiles(keys_a_tile), parts > 1, softcap is not None

    def prefill_flash_kernel(
        q: Any, keys: Any, values: Any, chunk: Any, sinks: Any, out: Any, rows: Any, tiles: Any, window: Any,
        first: Any, scale: Any,
    ) -> None:  # fmt: skip
        thread, block, grid = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        start_address = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        base = uint32(uint32(start_address + uint32(SWIZZLE_BYTES - 1)) & uint32(0xFFFFFFFF - SWIZZLE_BYTES + 1))
        barriers = uint32(base + uint32(barriers_at))
        if thread == uint32(0):
            begin(barriers)
            begin(uint32(barriers + uint32(stages * BARRIER_BYTES)))
            ptx_hopper.fence_barriers()
        ptx.let_next_kernel_start()
        ptx.wait_for_previous_kernel()
        cuda.syncthreads()
        number = uint32(uint32(grid - uint32(1)) - block)
        row_tile = uint32(number // uint32(heads))
        head = uint32(number - row_tile * uint32(heads))
        row, start = int64(row_tile) * int64(block_rows), int_at(chunk, int64(0))
        end = min(row + int64(block_rows), rows)
        last, count, origin = seen_tiles(start, row, end, window, first)
        places = uint32(base + uint32(queries_bytes))
        tile_at = (
            int64(uint32(head // uint32(shared))) * tiles + int64(uint32(last - origin))
        ) * int64(tile_bytes)  # fmt: skip
        sources = (keys + tile_at, values + tile_at)
        if warp >= uint32(first_copying):
            give()
            if warp == uint32(first_copying):
                copy_tiles(places, barriers, sources, count, lane)
        else:
            take()
            group, within = uint32(warp >> uint32(2)), uint32(thread & uint32(127))
            own = row if split else row + int64(group) * int64(GROUP_ROWS)
            queries = uint32(base + group * uint32(group_bytes))
            part = uint32(uint32(head * uint32(parts)) + group) if split else head
            upper = uint32(uint32((warp & uint32(3)) * uint32(16)) + uint32(lane >> uint32(2)))  # of the group's rows
            spots = (start + own, start + own + int64(upper), window, first)
            place_queries(queries, q, part, own, rows, group, within)
            if split:
                queries = base
            sums, peaks, totals = multiply(queries, places, barriers, spots, last, count, scale, lane, group)
            if capped:
                scale = float32(LOG2_E)
            finish(sums, peaks, totals, sinks, out, part, own + int64(upper), rows, scale, lane)

    name = f"prefill_flash_{heads}_{num_heads}_{dim}x{groups}"
    name += f"_sinks{8 * sink_bytes}" if sink_bytes else ""
    name += "_arranged" if arranged else ""
    name += "" if softcap is None else f"_cap{softcap:g}"
    shared_bytes = SWIZZLE_BYTES + barriers_at + 2 * stages * BARRIER_BYTES
    signature = (*(types.int64,) * 10, types.float32)
    return Kernel(
        name,
        prefill_flash_kernel,
        signature,
        128 * (groups + 1),
        1 if alone else BLOCKS[groups],
        shared_bytes,
        specific=True,
        whole=True,
    )


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Specialisations that CI compiles, for a GPU that has the instructions: heads of Llama-8B, gpt-oss and Gemma."""
    if not has_prefill_flash(gpu, HALF):
        return []
    made = [(32, 8, 128, 0, 2), (64, 8, 64, 2, 1), (32, 16, 256, 0, 2), (8, 2, 256, 0, 1), (32, 4, 512, 0, 2)]
    plain = [_make(*each, arranged) for each in made for arranged in (False, True)]
    return [*plain, _make(16, 8, 256, 0, 2, True, 50.0)]
