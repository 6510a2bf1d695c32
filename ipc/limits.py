"""This module has the limits of the server. Each can be set by its name, which errors about the limit also give."""

from dataclasses import dataclass, field, fields
from typing import Any

from lowlat.errors import ConfigError

__all__ = ["Limits"]


def _limit(default: float, low: float, high: float, help: str, *, rare: bool = False) -> Any:
    """Make a field with its range and help; the server's settings are made from the same metadata."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "rare": rare})


@dataclass(frozen=True)
class Limits:
    """Limits holds the server's limits. Raises ConfigError for a value out of its range."""

    max_message_bytes: int = _limit(
        8 << 20, 1024, 1 << 30, "Bytes of a client's frame; a longer one disconnects it.", rare=True
    )
    max_clients: int = _limit(256, 1, 1 << 16, "Connections at once; further ones are refused.", rare=True)
    max_requests_per_client: int = _limit(
        256, 1, 1 << 16, "Requests of one connection, waiting and running.", rare=True
    )
    max_queue: int = _limit(256, 0, 1 << 20, "Requests of all clients that wait for a slot; beyond it `busy`.")
    default_max_tokens: int = _limit(
        4096,
        1,
        (1 << 31) - 1,
        "Tokens of a chat that names no limit, at most: KV is reserved for so many, and the rest is left to others.",
    )
    max_credit: int = _limit(1 << 20, 1, (1 << 31) - 1, "Tokens that a request may be granted at once.", rare=True)
    append_credit: int = _limit(
        1 << 18, 1024, 1 << 30, "Bytes of a growing prompt that may come before they are tokens.", rare=True
    )
    prompt_idle_s: float = _limit(
        60.0, 0.05, 86400.0, "Seconds that a growing prompt may wait for more of it; then it is ended.", rare=True
    )
    max_bad_messages: int = _limit(8, 1, 1 << 16, "Wrong messages in a minute before a peer is dropped.", rare=True)
    max_messages_per_s: int = _limit(
        10_000,
        10,
        1 << 30,
        "Messages of one client in a second, STATS counted as 10; one that sends more is dropped.",
        rare=True,
    )
    high_water_mark: int = _limit(4096, 1, 1 << 20, "Messages queued to one peer by its socket.", rare=True)
    slow_consumer_s: float = _limit(
        30.0, 0.01, 3600.0, "Seconds that tokens may wait for credit before the stream is ended.", rare=True
    )
    heartbeat_interval_s: float = _limit(
        1.0, 0.05, 60.0, "Seconds between heartbeats, by which a silent peer is asked for a sign of life.", rare=True
    )
    heartbeat_timeout_s: float = _limit(
        10.0,
        0.1,
        300.0,
        "Seconds without a sign of life after which a peer is gone: at least two intervals.",
        rare=True,
    )
    drain_s: float = _limit(10.0, 0.0, 3600.0, "Seconds that SIGTERM lets requests finish.")
    max_wake_s: float = _limit(
        60.0, 0.05, 3600.0, "Seconds that requests wait for a model that sleeps; then `busy`.", rare=True
    )
    watchdog_factor: float = _limit(
        10.0, 2.0, 1000.0, "A step so many times older than its usual p99 hangs.", rare=True
    )
    watchdog_min_s: float = _limit(2.0, 0.1, 3600.0, "But no step of fewer seconds does.", rare=True)
    linger_s: float = _limit(
        0.5, 0.0, 60.0, "Seconds that last messages may take to leave when the server ends.", rare=True
    )
    spin_s: float = _limit(
        0.001,
        0.0,
        10.0,
        "Seconds after a request, where another came so soon before, in which one thread polls for the next one "
        "without sleeping; 0 never. Not where steps run on the CPU, nor on one core.",
        rare=True,
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            low, high = item.metadata["low"], item.metadata["high"]
            kinds = (int, float) if isinstance(item.default, float) else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise ConfigError(f"{item.name} must be from {low:.9g} to {high:.9g}, got {value!r:.80}")
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s:g}) must be at least twice heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}): a peer needs an interval to answer"
            )
