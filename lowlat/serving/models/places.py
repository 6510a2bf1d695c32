"""This module decides which model is woken or loaded next, and which models go to sleep for it.

The least recently used models go to sleep first. A model with requests goes to sleep only after the waiting one has
waited for a while; it finishes running requests, and new ones wait. Wakes are served in the order of their requests,
and before loads that have not waited for long.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Decision", "Place", "Presence", "decide"]

LOAD_PATIENCE = 6.0  # times busy_s; a load waits longer than a wake, as no request asked for it


class Presence(StrEnum):
    """The state of a model."""

    DOWN = "down"  # it has no process that holds memory
    STARTING = "starting"  # its process waits to load
    LOADING = "loading"
    AWAKE = "awake"
    FALLING = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"  # it is not started again


@dataclass
class Place:
    """One model's state and its memory on its devices.

    awake, asleep  bytes that it holds on each device in that state, by the device's name
    last_used      time when it last had requests
    wanted_since   time since when it waits for a wake or a load; None: it does not wait
    """

    name: str
    presence: Presence = Presence.DOWN
    awake: dict[str, int] = field(default_factory=dict)
    asleep: dict[str, int] = field(default_factory=dict)
    can_sleep: bool = True
    idle: bool = True
    last_used: float = 0.0
    wanted_since: float | None = None

    def held(self, device: str) -> int:
        """Return the bytes of a device that it holds now."""
        if self.presence in (Presence.DOWN, Presence.STARTING, Presence.FAILED):
            return 0
        return (self.asleep if self.presence is Presence.ASLEEP else self.awake).get(device, 0)

    def least(self, device: str) -> int:
        """Return the bytes of a device that it always holds, after it has freed all that it can."""
        held = self.held(device)
        return min(held, self.asleep.get(device, 0)) if self.can_sleep else held

    def freed(self, device: str) -> int:
        """Return the bytes of a device that a sleep frees."""
        return self.awake.get(device, 0) - self.asleep.get(device, 0)


@dataclass
class Decision:
    """A decision: models to load or wake, models to put to sleep, models that never fit, and when to decide again."""

    grants: list[str] = field(default_factory=list)
    sleeps: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    again_at: float | None = None


def decide(places: Sequence[Place], budgets: Mapping[str, int], now: float, busy_s: float) -> Decision:
    """Decide for all devices. A model gets the memory of all of its devices, or of none.

    budgets  bytes of each device that all models together may hold
    busy_s   how long a model waits before one with requests must go to sleep for it
    """
    decision = Decision()
    held = {device: sum(place.held(device) for place in places) for device in budgets}
    falling = [place for place in places if place.presence is Presence.FALLING]
    coming = {device: sum(place.freed(device) for place in falling) for device in budgets}
    awaited: set[str] = set()  # devices that one which asked earlier waits for, or it would wait for ever
    for place in _waiting(places, now - LOAD_PATIENCE * busy_s):
        if not awaited.isdisjoint(place.awake):
            continue
        needed = {device: held[device] + size - place.held(device) for device, size in place.awake.items()}
        if all(size <= budgets[device] for device, size in needed.items()):
            decision.grants.append(place.name)
            held |= needed
            continue
        problem = _problem(place, places, budgets)
        if problem is not None:
            decision.refusals[place.name] = problem
            continue
        awaited |= place.awake.keys()
        short = {device: size - budgets[device] - coming[device] for device, size in needed.items()}
        for victim in _sleepers(place, places, short, now, busy_s, decision):
            decision.sleeps.append(victim.name)
            for device in coming:
                coming[device] += victim.freed(device)
    return decision


def _problem(place: Place, places: Sequence[Place], budgets: Mapping[str, int]) -> str | None:
    """Why a model can never have its memory; None: it can, or nobody knows yet what one that loads will hold asleep."""
    for device, size in place.awake.items():
        others = [other for other in places if other is not place and device in other.awake]
        least = sum(other.least(device) for other in others)
        if size + least > budgets[device] and not any(p.presence is Presence.LOADING for p in others):
            return (
                f"{place.name} needs {size / 2**30:.3f} GiB of {device}, and models may hold "
                f"{budgets[device] / 2**30:.3f} GiB there (models_gib), of which {least / 2**30:.3f} are others' even "
                "when they sleep"
            )
    return None


def _sleepers(
    place: Place, places: Sequence[Place], short: dict[str, int], now: float, busy_s: float, decision: Decision
) -> list[Place]:
    """Choose the models that go to sleep for a model now.

    short  missing bytes of each device; reduced by what the sleeps free
    """
    patience = busy_s if place.presence is Presence.ASLEEP else LOAD_PATIENCE * busy_s
    since = now if place.wanted_since is None else place.wanted_since
    found: list[Place] = []
    for victim in _victims(places, place, decision.sleeps):
        if not any(short[device] > 0 and victim.freed(device) > 0 for device in short):
            continue
        if not victim.idle and now < since + patience:
            again = since + patience
            decision.again_at = again if decision.again_at is None else min(decision.again_at, again)
            return found
        found.append(victim)
        for device in short:
            short[device] -= victim.freed(device)
    for victim in found[::-1]:  # keep a model awake if the others free enough
        if all(short[device] + victim.freed(device) <= 0 for device in short):
            found.remove(victim)
            for device in short:
                short[device] += victim.freed(device)
    return found


def _waiting(places: Iterable[Place], long_ago: float) -> list[Place]:
    """Return the waiting models in order: wakes, and loads that wait since before `long_ago`, come first."""
    asking = [p for p in places if p.wanted_since is not None and p.presence in (Presence.ASLEEP, Presence.STARTING)]

    def order(place: Place) -> tuple[bool, float]:
        since = place.wanted_since or 0.0
        return place.presence is Presence.STARTING and since > long_ago, since

    return sorted(asking, key=order)


def _victims(places: Iterable[Place], place: Place, sleeping: Collection[str]) -> list[Place]:
    """Return the models that may sleep for another, in the order in which they should."""
    awake = [
        p for p in places if p is not place and p.presence is Presence.AWAKE and p.can_sleep and p.name not in sleeping
    ]
    return sorted(awake, key=lambda victim: (not victim.idle, victim.last_used))
