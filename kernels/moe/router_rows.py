"""The kernel of a router's logits of many rows, which are normed already.

A block keeps 16 experts in shared memory, and takes eight rows at a time there: a row is read once for 16 experts, and
a number is unpacked once for 4 experts or 8 rows. A logit's bits are those of `router_kernel`, whose order of columns,
lanes and quarters this is.
"""

from functools import cache
from typing import Any

from lowlat.kernels.toolchain import ptx, ptx_dots
from lowlat.kernels.toolchain.kernel import Gpu, Kernel
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["EXPERTS", "LEAST_ROWS", "ROWS", "blocks_of", "make_rows_router", "takes_rows"]

EXPERTS = 16  # of a block
ROWS = 8  # at a time
LEAST_ROWS = 256  # that are spread over the GPU's SMs
QUARTERS, GROUP = 4, 4  # of the columns; experts of a warp
WARPS = QUARTERS * EXPERTS // GROUP
THREADS = 32 * WARPS
TURN_BYTES = QUARTERS * 512  # of a row
PARTIALS = ROWS * EXPERTS * QUARTERS


def takes_rows(rows: int, width: int, gpu: Gpu) -> bool:
    """Whether rows are enough, and not too wide, for this kernel."""
    return rows >= LEAST_ROWS and _shared_bytes(width) <= gpu.shared_bytes


def blocks_of(rows: int, experts: int, gpu: Gpu) -> tuple[int, int, int]:
    """The grid: groups of experts, and blocks that share the rows of each."""
    groups = -(-experts // EXPERTS)
    return groups, max(1, min(-(-rows // ROWS), gpu.num_multiprocessors // groups)), 1


def _turns(width: int) -> int:
    """The turns in which a quarter's lanes take 8 columns each."""
    return -(-width * 2 // TURN_BYTES)


def _shared_bytes(width: int) -> int:
    """Experts and two areas of rows, padded with zeros, and two of the quarters' sums."""
    return (EXPERTS + 2 * ROWS) * _turns(width) * TURN_BYTES + 2 * 4 * PARTIALS


def _make_copy_rows(width: int, count: int) -> Any:
    """A function of a block: copy so many rows to an area, asynchronously; past the last row the last one again."""
    chunks, pitch = width // 8, _turns(width) * TURN_BYTES

    @device_function
    def copy_rows(area: Any, x: Any, first: Any, rows: Any, thread: Any) -> None:
        for number in range(thread, uint32(count * chunks), uint32(THREADS)):
            row = uint32(uint32(number) // uint32(chunks))
            chunk = uint32(uint32(number) - row * uint32(chunks))
            source = x + int64(min(uint32(first + row), uint32(rows - uint32(1)))) * int64(2 * width)
            place = uint32(area + row * uint32(pitch) + chunk * uint32(16))
            ptx.copy_async_16(place, source + int64(chunk) * int64(16))

    return copy_rows


@cache
def make_rows_router(width: int, experts: int, biased: bool = True) -> Kernel:
    """The kernel for E experts and rows [.., N]. Grid: as `blocks_of` has it."""
    turns = _turns(width)
    pitch, area_bytes, chunks = turns * TURN_BYTES, ROWS * turns * TURN_BYTES, width // 8
    copy_experts, copy_rows = _make_copy_rows(width, EXPERTS), _make_copy_rows(width, ROWS)
    dot = ptx_dots.dot_rows(ROWS, GROUP, turns, pitch, TURN_BYTES)
    add_lanes, wait = ptx_dots.add_across_lanes(), ptx.copies_wait(0)

    @device_function
    def clear_ends(base: Any, thread: Any) -> None:
        """Zeros after the rows of experts and both areas."""
        spare = uint32(turns * QUARTERS * 32 - chunks)
        for number in range(thread, uint32(EXPERTS + 2 * ROWS) * spare, uint32(THREADS)):
            row = uint32(uint32(number) // spare)
            chunk = uint32(uint32(chunks) + uint32(number) - row * spare)
            none = uint32(0)
            ptx.store_shared_128(uint32(base + row * uint32(pitch) + chunk * uint32(16)), none, none, none, none)

    @device_function
    def finish(area: Any, bias: Any, logits: Any, first: Any, rows: Any, block: Any, thread: Any) -> None:
        """Add the quarters of a logit up, by a thread."""
        row, own = uint32(thread >> uint32(4)), uint32(thread & uint32(15))
        expert = uint32(block * uint32(EXPERTS) + own)
        if uint32(first + row) < rows and expert < uint32(experts):
            at = uint32(area + thread * uint32(4 * QUARTERS))
            total = ptx.load_shared_f32(at)
            for quarter in range(1, QUARTERS):
                total = ptx.add_rn(total, ptx.load_shared_f32(uint32(at + uint32(4 * quarter))))
            if biased:
                total = ptx.add_rn(total, ptx.load_global_bf16(bias + int64(expert) * int64(2)))
            place = int64(uint32(first + row)) * int64(experts) + int64(expert)
            ptx.store_global_f32(logits + place * int64(4), total)

    def router_rows(x: Any, weight: Any, bias: Any, logits: Any, rows: Any) -> None:
        base = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        thread, block, rows = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(rows)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        quarter, group = uint32(warp & uint32(3)), uint32(warp >> uint32(2))
        along = uint32(quarter * uint32(32) + lane)
        copy_experts(base, weight, uint32(block * uint32(EXPERTS)), uint32(experts), thread)
        clear_ends(base, thread)
        theirs = uint32(base + group * uint32(GROUP * pitch) + along * uint32(16))
        base = uint32(base + uint32(EXPERTS * pitch))
        ptx.copies_commit()
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        first, turn = uint32(uint32(cuda.blockIdx.y) * uint32(ROWS)), uint32(0)
        jump = uint32(uint32(cuda.gridDim.y) * uint32(ROWS))
        if first < rows:
            copy_rows(base, x, first, rows, thread)
        # of a row and an expert of the block, its quarters side by side
        mine = uint32((lane >> uint32(2)) * uint32(EXPERTS) + group * uint32(GROUP) + (lane & uint32(3)))
        mine = uint32(uint32(mine * uint32(QUARTERS) + quarter) * uint32(4))
        while first < rows:
            ptx.copies_commit()
            wait()
            cuda.syncthreads()  # these rows are there, and nobody reads the other area any more
            following = uint32(first + jump)
            if following < rows:
                copy_rows(uint32(base + (turn ^ uint32(1)) * uint32(area_bytes)), x, following, rows, thread)
            area = uint32(base + turn * uint32(area_bytes))
            sums = uint32(uint32(base + uint32(2 * area_bytes)) + turn * uint32(4 * PARTIALS))
            total = add_lanes(dot(uint32(area + along * uint32(16)), theirs), lane)
            ptx.store_shared_f32(uint32(sums + mine), total)
            cuda.syncthreads()
            if thread < uint32(ROWS * EXPERTS):
                finish(sums, bias, logits, first, rows, block, thread)
            first, turn = following, uint32(turn ^ uint32(1))

    name = f"router_rows_n{width}_e{experts}{'' if biased else '_unbiased'}"
    return Kernel(name, router_rows, (types.int64,) * 5, THREADS, 1, _shared_bytes(width))
