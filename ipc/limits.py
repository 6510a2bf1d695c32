"""Every bound of the server, in one place; each may be set by name, and an error that speaks of one names it."""

from dataclasses import dataclass, fields

from lowlat.errors import ConfigError

__all__ = ["Limits"]

_RANGES: dict[str, tuple[float, float]] = {
    "max_message_bytes": (1024, 1 << 30),
    "max_clients": (1, 1 << 16),
    "max_requests_per_client": (1, 1 << 16),
    "max_queue": (0, 1 << 20),
    "max_credit": (1, (1 << 31) - 1),
    "max_bad_messages": (1, 1 << 16),
    "max_messages_per_s": (10, 1 << 30),
    "high_water_mark": (1, 1 << 20),
    "slow_consumer_s": (0.01, 3600.0),
    "heartbeat_interval_s": (0.05, 60.0),
    "heartbeat_timeout_s": (0.1, 300.0),
    "drain_s": (0.0, 3600.0),
    "watchdog_factor": (2.0, 1000.0),
    "watchdog_min_s": (0.1, 3600.0),
    "linger_s": (0.0, 60.0),
    "spin_s": (0.0, 10.0),
}


@dataclass(frozen=True)
class Limits:
    """The server's limits.

    max_message_bytes        one frame from a client; a longer one disconnects it
    max_clients              connections at once; further ones are refused
    max_requests_per_client  requests of one connection, waiting and running
    max_queue                requests of all clients that wait for a slot; beyond it `busy`
    max_credit               tokens that a request may be granted at once
    max_bad_messages         wrong messages before a peer is dropped
    max_messages_per_s       messages of one client, over a second; one that sends more is dropped
    high_water_mark          messages queued to one peer by its socket
    slow_consumer_s          how long tokens may wait for credit before the stream is ended
    heartbeat_interval_s     between heartbeats, by which a silent peer is asked for a sign of life
    heartbeat_timeout_s      without any sign of life, after which a peer is gone: at least two intervals
    drain_s                  how long a terminated server lets requests finish
    watchdog_factor          a step older than so many times its usual p99 hangs
    watchdog_min_s           but no step younger than this does
    linger_s                 how long last messages may take to leave when the server ends
    spin_s                   how long after a request, where another came so soon before, one thread polls without
                             sleeping for the next one; 0 never. Not where steps run on the CPU, nor on one core
    Raises ConfigError for a value out of its range.
    """

    max_message_bytes: int = 8 << 20
    max_clients: int = 256
    max_requests_per_client: int = 64
    max_queue: int = 256
    max_credit: int = 1 << 20
    max_bad_messages: int = 8
    max_messages_per_s: int = 10_000
    high_water_mark: int = 4096
    slow_consumer_s: float = 30.0
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    drain_s: float = 10.0
    watchdog_factor: float = 10.0
    watchdog_min_s: float = 2.0
    linger_s: float = 0.5
    spin_s: float = 0.001

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = _RANGES[field.name]
            kinds = (int, float) if isinstance(field.default, float) else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise ConfigError(f"{field.name} must be from {low:g} to {high:g}, got {value!r:.80}")
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s:g}) must be at least twice heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}): a peer needs an interval to answer"
            )
