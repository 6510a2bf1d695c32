"""This module makes blocks of `Runtime.summary`: the KV cache, paused requests, and a queue that is held up."""

from dataclasses import asdict
from typing import Any

from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.engine.sessions.book import SessionBook
from lowlat.sequence.tiers.tiers import CacheTiers
from lowlat.step.state import StepGeometry

__all__ = ["held_up_summary", "kv_summary", "paused_summary"]


def kv_summary(
    scheduler: Scheduler, sessions: SessionBook, tiers: CacheTiers | None, geometry: StepGeometry
) -> dict[str, Any]:
    """Count blocks of the KV cache by state; blocks of other pools are counted separately, by kind."""
    counted = sessions.stats()  # called first: it ends expired sessions, which frees their pinned chunks
    kvcache = scheduler.kvcache
    found: dict[str, Any] = {
        **asdict(kvcache.stats()),
        "capacity_tokens": geometry.num_kv_tokens,
        "cache_dtype": geometry.config.cache_dtype,
    }
    if counted:
        found["sessions"] = counted
    in_tiers = {} if tiers is None else {"tiers": tiers.stats()}
    return found | kvcache.pool_stats() | in_tiers


def paused_summary(scheduler: Scheduler) -> dict[str, int]:
    """Count the paused requests, those that have decoded and have no slot, and the host memory of the latter."""
    space = scheduler.space
    kept = {"num_without_slot": len(space.held), "host_bytes": space.num_bytes, "max_host_bytes": space.max_bytes}
    return {"num_paused": scheduler.num_paused, **kept}


def held_up_summary(scheduler: Scheduler) -> dict[str, Any]:
    """A block `held_up` if the queue's head waits for memory that paused requests and open prompts hold; else {}."""
    found = scheduler.held_up()
    return {} if found is None else {"held_up": {**asdict(found), "text": str(found)}}
