"""This module makes blocks of `Runtime.summary`: what the KV cache holds, what paused requests take, and who waits."""

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
    """Count blocks of the KV cache by state; those of other pools apart, by kind, where there are any."""
    counted = sessions.stats()  # first: those whose time has passed pin nothing
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
    """Count requests that are paused, those that have decoded and have no slot, and the host memory that these take."""
    space = scheduler.space
    kept = {"num_without_slot": len(space.held), "host_bytes": space.num_bytes, "max_host_bytes": space.max_bytes}
    return {"num_paused": scheduler.num_paused, **kept}


def held_up_summary(scheduler: Scheduler) -> dict[str, Any]:
    """The block of a queue whose head waits for what paused requests and open prompts hold; nothing while it may go
    on."""
    found = scheduler.held_up()
    return {} if found is None else {"held_up": {**asdict(found), "text": str(found)}}
