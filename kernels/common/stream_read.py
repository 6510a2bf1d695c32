"""This module reads memory once and folds it into a few words, to measure the bandwidth that a GPU's memory delivers.

The words are written, so that the compiler can omit no load. Their exclusive or is that of all words read, so that a
caller can check it.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, types, uint32

__all__ = ["examples", "stream_read"]

LOADS = 4  # of 16 bytes, in flight at once in a thread
DEFAULT_THREADS = 512


@cache
def _make(threads: int, blocks: int, spread: bool) -> Kernel:
    run = LOADS * threads * 16  # bytes that a block reads at once
    begin = threads * 16 if spread else run  # from a block's first byte to the next block's
    stride = threads * 16 * (blocks if spread else 1)  # from one of a thread's loads to the next
    advance = run * blocks

    def read(source: Any, count: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        address = source + block * begin + thread * 16
        end = source + count
        folded = uint32(0)
        while address + (LOADS - 1) * stride < end:
            a = ptx.load_global_nc_128(address)
            b = ptx.load_global_nc_128(address + stride)
            c = ptx.load_global_nc_128(address + 2 * stride)
            d = ptx.load_global_nc_128(address + 3 * stride)
            for k in range(4):
                folded = uint32(folded ^ a[k] ^ b[k] ^ c[k] ^ d[k])
            address += advance
        for load in range(LOADS - 1):
            if address + load * stride < end:
                a = ptx.load_global_nc_128(address + load * stride)
                for k in range(4):
                    folded = uint32(folded ^ a[k])
        ptx.store_global_u32(out + (block * threads + thread) * 4, folded)

    return Kernel(
        name=f"stream_read_{threads}x{blocks}_{'spread' if spread else 'runs'}",
        function=read,
        signature=(types.int64, types.int64, types.int64),
        threads=threads,
        min_blocks=max(1, 2048 // threads),
    )


def stream_read(
    source: torch.Tensor, *, out: torch.Tensor, blocks: int, threads: int = DEFAULT_THREADS, spread: bool = False
) -> list[KernelCall]:
    """Read every byte of `source` once, 16 at a time, bypassing L1, and fold it by exclusive or.

    source  any shape and dtype, contiguous, of a multiple of 16 bytes, 16-byte aligned
    out     [blocks * threads]  int32, out: one word a thread
    blocks  the grid: a few times the number of SMs, each of which holds at most 2048 threads
    spread  all blocks read neighbouring memory at the same time; else a block reads one run of memory at a time
    Time: the bytes over the GPU's bandwidth. Captured: yes. Raises ShapeError for other sizes.
    """
    size = source.numel() * source.element_size()
    if size == 0 or size % 16 or source.data_ptr() % 16:
        raise ShapeError(f"stream_read reads aligned multiples of 16 bytes, got {size} at {source.data_ptr():#x}")
    if not source.is_contiguous():
        raise ShapeError(f"stream_read reads contiguous memory, got strides {source.stride()}")
    if tuple(out.shape) != (blocks * threads,) or out.element_size() != 4:
        raise ShapeError(f"out must be [{blocks * threads}] of 4 bytes each, got {list(out.shape)} of {out.dtype}")
    # not dependent: if a launch started before the previous one ended, its measured time would be too short
    return [KernelCall(_make(threads, blocks, spread), (blocks, 1, 1), (source, size, out), dependent=False)]


def examples() -> list[Kernel]:
    """Representative specialisations, for compilation without a GPU."""
    return [_make(DEFAULT_THREADS, 528, spread) for spread in (False, True)]
