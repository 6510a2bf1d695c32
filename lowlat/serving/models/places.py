"""The holders of the devices' memory: which model is woken or loaded next, and which ones sleep for it.

Models that nobody asked for longest go first, and those with requests only after one that waits has waited for a while:
they finish what runs, and what comes meanwhile waits. Wakes are served in the order in which they were asked for, and
before loads, unless these have waited for long.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Decision", "Place", "Presence", "decide"]

LOAD_PATIENCE = 6.0  # times busy_s: nobody asked for what is loaded first


class Presence(StrEnum):
    """Where a model is."""

    DOWN = "down"  # it has no process that holds memory
    STARTING = "starting"  # its process waits to load
    LOADING = "loading"
    AWAKE = "awake"
    FALLING = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"  # for good


@dataclass
class Place:
    """One model's part of a device's memory.

    awake_bytes, asleep_bytes   held there
    last_used                   when requests were there last
    wanted_since                it waits to be woken or loaded; None: nobody asks
    """

    name: str
    presence: Presence = Presence.DOWN
    device: str = ""
    awake_bytes: int = 0
    asleep_bytes: int = 0
    can_sleep: bool = True
    idle: bool = True
    last_used: float = 0.0
    wanted_since: float | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        if self.presence in (Presence.DOWN, Presence.STARTING, Presence.FAILED):
            return 0
        return self.asleep_bytes if self.presence is Presence.ASLEEP else self.awake_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes held where others need all that it can spare."""
        return min(self.held_bytes, self.asleep_bytes) if self.can_sleep else self.held_bytes


@dataclass
class Decision:
    """The decision for now: models to load or wake, to put to sleep, those that never fit, and when to ask again."""

    grants: list[str] = field(default_factory=list)
    sleeps: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    again_at: float | None = None


def decide(places: Iterable[Place], budgets: Mapping[str, int], now: float, busy_s: float) -> Decision:
    """Decide for all devices.

    budgets  bytes of each device that all models together may hold
    busy_s   after so long a model with requests must let its memory go for one that waits
    """
    decision = Decision()
    by_device: dict[str, list[Place]] = {}
    for place in places:
        by_device.setdefault(place.device, []).append(place)
    for device, own in by_device.items():
        if device in budgets:
            _decide_device(own, budgets[device], now, busy_s, decision)
    return decision


def _decide_device(places: list[Place], budget: int, now: float, busy_s: float, decision: Decision) -> None:
    held = sum(place.held_bytes for place in places)
    coming = sum(p.awake_bytes - p.asleep_bytes for p in places if p.presence is Presence.FALLING)
    sleeping: set[str] = set()
    for place in _waiting(places, now - LOAD_PATIENCE * busy_s):
        extra = place.awake_bytes - place.held_bytes
        least = sum(other.least_bytes for other in places if other is not place)
        if held + extra <= budget:
            decision.grants.append(place.name)
            held += extra
            continue
        if place.awake_bytes + least > budget and not any(p.presence is Presence.LOADING for p in places):
            decision.refusals[place.name] = (
                f"{place.name} needs {place.awake_bytes / 2**30:.3f} GiB of {place.device}, and models may hold "
                f"{budget / 2**30:.3f} GiB there (models_gib), of which {least / 2**30:.3f} are others' even when they "
                "sleep"
            )
            continue
        patience = busy_s if place.presence is Presence.ASLEEP else LOAD_PATIENCE * busy_s
        since = now if place.wanted_since is None else place.wanted_since
        short = held + extra - budget - coming
        for victim in _victims(places, place, sleeping):
            if short <= 0:
                break
            if not victim.idle and now < since + patience:
                again = since + patience
                decision.again_at = again if decision.again_at is None else min(decision.again_at, again)
                break
            sleeping.add(victim.name)
            decision.sleeps.append(victim.name)
            freed = victim.awake_bytes - victim.asleep_bytes
            short, coming = short - freed, coming + freed
        return  # those that asked later wait, or the first would wait for ever


def _waiting(places: Iterable[Place], long_ago: float) -> list[Place]:
    """Those that ask, in order; wakes before loads that have not waited since long ago."""
    asking = [p for p in places if p.wanted_since is not None and p.presence in (Presence.ASLEEP, Presence.STARTING)]

    def order(place: Place) -> tuple[bool, float]:
        since = place.wanted_since or 0.0
        return place.presence is Presence.STARTING and since > long_ago, since

    return sorted(asking, key=order)


def _victims(places: Iterable[Place], place: Place, sleeping: set[str]) -> list[Place]:
    """Those that may sleep for another, the first to go first."""
    awake = [
        p for p in places if p is not place and p.presence is Presence.AWAKE and p.can_sleep and p.name not in sleeping
    ]
    return sorted(awake, key=lambda victim: (not victim.idle, victim.last_used))
