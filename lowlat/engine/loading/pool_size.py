"""This module sizes the pools of KV blocks: for max_batch requests, by blocks or GiB, or by the GPUs' free memory.

The first pool's number of blocks is chosen. The number of the largest requests that it holds decides the sizes of
windows' pools, and the number of snapshots of recurrent states. All ranks have the same numbers of blocks, whatever the
bytes of a block on each.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lowlat.engine.memory.plan import MemoryNeed, available_bytes
from lowlat.errors import ConfigError
from lowlat.graphs import Paging
from lowlat.options.runtime import MAX_KV_BLOCKS, RuntimeConfig
from lowlat.step.state import StepGeometry, state_specs

__all__ = ["check_free", "fill_devices", "kv_bytes", "settle_pools", "takes_all_free"]

GIB = 1 << 30
MAX_SNAPSHOTS = 32  # for each request of the largest size: more are seldom reused
MARGIN_BYTES = 1 << 30  # for graphs, code and libraries' memory, which no plan counts
MARGIN_SHARE = 50  # one in so many free bytes is added to the margin, for errors of plans

Cut = Callable[[StepGeometry], Sequence[StepGeometry]]


def settle_pools(geometry: StepGeometry, options: RuntimeConfig, cut: Cut) -> StepGeometry:
    """Give a geometry the pools that the options ask for; with kv_cache_gib 'free' they hold one request for now.

    cut  makes each rank's geometry from the whole one
    Raises ConfigError for a kv_cache_gib that is too small for one request of the largest size.
    """
    size, most = options.kv_cache_gib, geometry.table_width
    if takes_all_free(options):
        return _with_blocks(geometry, options, most + 1)
    if not isinstance(size, (int, float)):
        default = options.max_batch * most + 1
        return _with_blocks(geometry, options, default if options.kv_blocks is None else options.kv_blocks)

    ranks = cut(geometry)

    def taken(num_blocks: int) -> int:
        return max(map(kv_bytes, _alike(ranks, _with_blocks(geometry, options, num_blocks))))

    num_blocks = _most_blocks(geometry, taken, int(size * GIB))
    if num_blocks is None:
        raise ConfigError(
            f"kv_cache_gib {size:g} is less than the {_rounded_up(taken(most + 1))} GiB that {_one_request(geometry)} "
            f"takes; raise kv_cache_gib, or lower max_context{' or max_batch' if geometry.windows else ''}"
        )
    return _with_blocks(geometry, options, num_blocks)


def takes_all_free(options: RuntimeConfig) -> bool:
    """Whether the KV cache takes all free memory of its GPUs."""
    return options.kv_cache_gib == "free"


def check_free(options: RuntimeConfig, device: torch.device, *, shares: bool = False) -> None:
    """Raise ConfigError if the KV cache is to take all free memory, but that amount has no meaning.

    shares  whether other runtimes wait for memory of these devices, or make way for this one
    """
    if not takes_all_free(options):
        return
    if device.type != "cuda":
        raise ConfigError(
            f"kv_cache_gib 'free' is what a GPU has left, and this runtime is on {device}, whose memory others need, "
            "too; give a number of GiB, or leave it out"
        )
    if shares:
        raise ConfigError(
            "kv_cache_gib 'free' is for a model that has its GPUs to itself: what is free beside others depends on "
            "which of them are awake; give each model a number of GiB"
        )


def fill_devices(
    geometry: StepGeometry,
    ranks: Sequence[StepGeometry],
    options: RuntimeConfig,
    needs: Sequence[MemoryNeed],
    devices: Sequence[torch.device],
) -> tuple[StepGeometry, list[StepGeometry]]:
    """Size the pools of the whole geometry and of its ranks by the GPUs' remaining memory.

    needs, devices  of each rank, in order, as `ranks` are sized
    A GPU's remaining memory is its free memory without weights, states, scratch and a margin of MARGIN_BYTES and one
    byte in MARGIN_SHARE. The GPU with the least decides. Raises ConfigError if one request of the largest size does not
    fit.
    """
    free = {device: _free_bytes(device) for device in dict.fromkeys(devices)}
    margins = {device: MARGIN_BYTES + size // MARGIN_SHARE for device, size in free.items()}

    def lacking(num_blocks: int) -> dict[torch.device, int]:
        """Bytes that each device lacks; negative where it has some left."""
        whole = _with_blocks(geometry, options, num_blocks)
        found = {device: margins[device] - size for device, size in free.items()}
        for before, after, need, device in zip(ranks, _alike(ranks, whole), needs, devices, strict=True):
            growth = _state_bytes(after) - _state_bytes(before)
            found[device] += need.total_bytes + max(0, growth - need.loading_bytes)  # packing uses the caches' memory
        return found

    num_blocks = _most_blocks(geometry, lambda count: max(lacking(count).values()), 0)
    if num_blocks is None:
        short = lacking(geometry.table_width + 1)
        device = max(short, key=lambda each: short[each])
        raise ConfigError(
            f"kv_cache_gib 'free': {device} has {free[device] / GIB:.2f} GiB free, and {_rounded_up(short[device])} "
            f"GiB more are needed for weights, scratch, a margin of {margins[device] / GIB:.2f} GiB and "
            f"{_one_request(geometry)}; lower max_context or max_batch, or take a smaller model"
        )
    whole = _with_blocks(geometry, options, num_blocks)
    return whole, _alike(ranks, whole)


def kv_bytes(geometry: StepGeometry) -> int:
    """Bytes of all paged buffers in all pools: keys and values, and the data kept for each block."""
    paged = (Paging.POSITIONS, Paging.BLOCKS)
    return sum(spec.num_bytes for spec in state_specs(geometry) if spec.paging in paged)


def _state_bytes(geometry: StepGeometry) -> int:
    """Bytes of all buffers that outlive a step."""
    return sum(spec.num_bytes for spec in state_specs(geometry))


def _with_blocks(geometry: StepGeometry, options: RuntimeConfig, num_blocks: int) -> StepGeometry:
    """Give a geometry `num_blocks` blocks in the first pool, and the sizes of other pools that follow from it."""
    geometry = replace(geometry, num_blocks=num_blocks, window_blocks=(), num_snapshots=0)
    worst, per_chunk = geometry.table_width, options.prefill_chunk // options.block_size
    num_requests = max(options.max_batch, num_blocks // worst)
    pools = [pool.default_blocks(worst, per_chunk, num_requests) for pool in geometry.window_pools]
    snapshots, size = 0, geometry.snapshot_bytes
    if size and options.prefix_reuse:
        snapshots = min(int(options.state_cache_gib * GIB) // size, MAX_SNAPSHOTS * num_requests)
    return replace(geometry, window_blocks=tuple(pools), num_snapshots=snapshots)


def _alike(ranks: Sequence[StepGeometry], whole: StepGeometry) -> list[StepGeometry]:
    """Give the ranks as many blocks and snapshots as the whole geometry has."""
    blocks, windows, snapshots = whole.num_blocks, whole.window_blocks, whole.num_snapshots
    return [replace(rank, num_blocks=blocks, window_blocks=windows, num_snapshots=snapshots) for rank in ranks]


def _most_blocks(geometry: StepGeometry, taken: Callable[[int], int], limit: int) -> int | None:
    """The most blocks of the first pool that take no more than a limit; None if one request's blocks take more."""
    least = geometry.table_width + 1
    count = bisect_right(range(least, MAX_KV_BLOCKS + 1), limit, key=taken)
    return least + count - 1 if count else None


def _free_bytes(device: torch.device) -> int:
    free = available_bytes(device)
    if free is None:
        raise ConfigError(f"kv_cache_gib 'free': it cannot be told what is free on {device}; give a number of GiB")
    return free


def _one_request(geometry: StepGeometry) -> str:
    """Describe the contents of the smallest cache."""
    windows = f", and the windows' layers of max_batch {geometry.max_batch}" if geometry.windows else ""
    return f"one request of max_context {geometry.max_context}{windows}"


def _rounded_up(num_bytes: int) -> str:
    """Format bytes in GiB, rounded up."""
    digits = 3 if num_bytes >= GIB // 10 else 6
    return f"{math.ceil(num_bytes / GIB * 10**digits) / 10**digits:.{digits}f}"
