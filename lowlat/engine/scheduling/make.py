"""This module makes the scheduler of a runtime, with the KV cache that it reserves from."""

from lowlat.engine.memory.host_space import HostSpace
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.options.runtime import RuntimeConfig
from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.pool_book import PoolBook
from lowlat.sequence.snapshot_book import SnapshotBook
from lowlat.sequence.tiers.tiers import CacheTiers
from lowlat.sequence.window_book import WindowBook
from lowlat.step.ladder import StepLadder
from lowlat.step.state import StepGeometry

__all__ = ["make_scheduler"]


def make_scheduler(
    ladder: StepLadder,
    geometry: StepGeometry,
    options: RuntimeConfig,
    tiers: CacheTiers | None = None,
    space: HostSpace | None = None,
) -> Scheduler:
    """Make a runtime's scheduler.

    tiers  the cache's tiers below the KV blocks
    space  the host memory for requests without a slot
    Raises ConfigError for sizes that do not fit each other.
    """
    sizes = geometry.num_blocks, geometry.block_size, geometry.prefill_chunk
    books: list[PoolBook] = [WindowBook(pool, geometry.prefill_chunk) for pool in geometry.window_pools]
    if geometry.snapshot_bytes:
        interval = -(-options.state_interval // geometry.prefill_chunk) * geometry.prefill_chunk
        books.append(SnapshotBook(geometry.max_batch, geometry.num_snapshots, geometry.prefill_chunk, interval))
    kvcache = KVCache(*sizes, reuse=options.prefix_reuse, share_decoded=options.share_decoded, books=books, tiers=tiers)
    return Scheduler(
        ladder, kvcache, options.max_batch, options.max_queue, geometry.prefill_chunk,
        max_prefill_chunks=geometry.max_prefill_chunks, max_stall_ms=options.max_stall_ms,
        num_overprovision=geometry.overhang, space=space,
    )  # fmt: skip
