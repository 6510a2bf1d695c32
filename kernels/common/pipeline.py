"""This module passes a tile's partial sums from mainloop warps to epilogue warps, while the mainloop warps multiply on.

Sums are in areas of shared memory that are used in turn. An area has two barriers: producers arrive at one when the
area is full, and consumers at the other when it is free.
"""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["BARRIER_BYTES", "Pipeline", "make_pipeline"]

BARRIER_BYTES = 16  # both barriers of an area
FREE = 8  # bytes from an area's full barrier to its free barrier


@dataclass(frozen=True)
class Pipeline:
    """Device functions of a pipeline. They take the barriers' address, an area, its phase's parity, or the lane.

    begin       (barriers) initialises them; one thread calls it, before a barrier of the block
    await_free  (barriers, area, parity) waits for a free area; a producer warp calls it, first with parity 1
    give        (barriers, area, lane) marks an area as full; a producer warp calls it after its stores
    await_full  (barriers, area, parity) waits for a full area; a consumer warp calls it, first with parity 0
    release     (barriers, area, lane) marks an area as free in every block of a cluster; a consumer calls it after
                its reads
    after       (area, parity) returns those of the next area
    """

    begin: Any
    await_free: Any
    give: Any
    await_full: Any
    release: Any
    after: Any


def make_pipeline(areas: int, producers: int, consumers: int, *, suspends: bool, cluster: int = 1) -> Pipeline:
    """Make a pipeline for these numbers of areas, producer warps and consumer warps.

    suspends  a waiting warp may be suspended, see `Gpu.suspends`
    cluster   blocks of a cluster; an area is free when the consumers of all of them have read theirs
    """
    is_over = ptx.barrier_is_over_soon if suspends else ptx.barrier_is_over

    @device_function
    def begin(barriers: Any) -> None:
        for area in range(areas):
            at = uint32(barriers + uint32(area * BARRIER_BYTES))
            ptx.barrier_init(at, uint32(producers))
            ptx.barrier_init(uint32(at + uint32(FREE)), uint32(consumers * cluster))

    @device_function
    def await_full(barriers: Any, area: Any, parity: Any) -> None:
        barrier = uint32(barriers + area * uint32(BARRIER_BYTES))
        while is_over(barrier, parity) == uint32(0):
            pass
        ptx.sync_warp()

    @device_function
    def give(barriers: Any, area: Any, lane: Any) -> None:
        ptx.sync_warp()
        if lane == uint32(0):
            ptx.barrier_arrive(uint32(barriers + area * uint32(BARRIER_BYTES)))

    @device_function
    def await_free(barriers: Any, area: Any, parity: Any) -> None:
        await_full(uint32(barriers + uint32(FREE)), area, parity)

    @device_function
    def release(barriers: Any, area: Any, lane: Any) -> None:
        free = uint32(barriers + uint32(FREE))
        if cluster == 1:
            give(free, area, lane)
        else:
            ptx.sync_warp()
            if lane < uint32(cluster):
                ptx_hopper.barrier_arrive_at(uint32(free + area * uint32(BARRIER_BYTES)), lane)

    @device_function
    def after(area: Any, parity: Any) -> Any:
        area = uint32(area + uint32(1))
        if area == uint32(areas):
            area, parity = uint32(0), uint32(parity ^ uint32(1))
        return area, parity

    return Pipeline(begin, await_free, give, await_full, release, after)
