"""This module counts for the server: times in small histograms, tokens a second, and ends of requests."""

import math
import time
from typing import Any

__all__ = ["Histogram", "Statistics"]

BUCKETS_PER_OCTAVE = 8  # a percentile is off by at most 9 %
NUM_OCTAVES = 27  # from 1 us to 134 s
NUM_BUCKETS = BUCKETS_PER_OCTAVE * NUM_OCTAVES + 1
WINDOW_S = 5


class Histogram:
    """Counts times in buckets that grow by a constant factor: constant memory and time, percentiles within 9 %."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def record(self, seconds: float, times: int = 1) -> None:
        """Count a duration `times` times."""
        bucket = int(math.log2(seconds * 1e6) * BUCKETS_PER_OCTAVE) + 1 if seconds > 1e-6 else 0
        self._counts[bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1] += times
        self.count += times
        self.sum_s += seconds * times
        if seconds > self.max_s:
            self.max_s = seconds

    def percentile(self, fraction: float) -> float:
        """Return the upper edge of this percentile's bucket, in seconds; 0.0 without any record."""
        if not self.count:
            return 0.0
        wanted = math.ceil(fraction * self.count)
        below = 0
        for bucket, count in enumerate(self._counts):
            below += count
            if below >= wanted:
                return float(min(1e-6 * 2.0 ** (bucket / BUCKETS_PER_OCTAVE), self.max_s))
        return self.max_s

    def to_dict(self) -> dict[str, Any]:
        """Return count, sum, percentiles and maximum, in milliseconds.

        octaves  counts of times up to 1 us, from 1 to 2 us, from 2 to 4 us, ...
        """
        counts = self._counts
        begins = range(1, NUM_BUCKETS, BUCKETS_PER_OCTAVE)
        return {
            "count": self.count,
            "sum": self.sum_s * 1e3,
            "octaves": [counts[0], *(sum(counts[begin : begin + BUCKETS_PER_OCTAVE]) for begin in begins)],
            "p50": self.percentile(0.50) * 1e3,
            "p90": self.percentile(0.90) * 1e3,
            "p99": self.percentile(0.99) * 1e3,
            "max": self.max_s * 1e3,
        }


class _Rate:
    """Events a second over the last few whole seconds."""

    def __init__(self) -> None:
        self._seconds = [0] * (WINDOW_S + 1)
        self._now = int(time.monotonic())

    def add(self, count: int, now: float) -> None:
        self._turn(int(now))
        self._seconds[self._now % len(self._seconds)] += count

    def per_second(self, now: float) -> float:
        self._turn(int(now))
        whole = sum(self._seconds) - self._seconds[self._now % len(self._seconds)]
        return whole / WINDOW_S

    def _turn(self, second: int) -> None:
        if second <= self._now:
            return
        for passed in range(self._now + 1, min(second, self._now + len(self._seconds)) + 1):
            self._seconds[passed % len(self._seconds)] = 0
        self._now = second


class Statistics:
    """Counters of the requests, written and read only under the I/O thread's lock.

    time_to_first_token   from a SUBMIT's arrival until its first token is sent
    inter_token           between a request's tokens, as they are sent; a message's time is divided by its tokens
    queued                from a SUBMIT's arrival until the engine gets it, of requests that gave a token
    ends, conversions     numbers of completions, and of conversions, by the way they ended
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.queued = Histogram()
        self.duration = Histogram()
        self.num_tokens = 0
        self.num_requests = 0
        self.ends: dict[str, int] = {}
        self.conversions: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.num_bad_messages = 0
        self.num_dropped_peers = 0
        self._rate = _Rate()

    def tokens(self, count: int, now: float) -> None:
        """Count tokens that were sent."""
        self.num_tokens += count
        self._rate.add(count, now)

    def end(self, name: str, *, converts: bool) -> None:
        """Count a request that ended; name is its error's code or finish reason; converts: it was a conversion."""
        ends = self.conversions if converts else self.ends
        ends[name] = ends.get(name, 0) + 1

    def refuse(self, code: str) -> None:
        """Count a request that was refused, by the error's code."""
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def to_dict(self, now: float) -> dict[str, Any]:
        """Return all counters, times in milliseconds."""
        return {
            "uptime_s": now - self.started,
            "tokens_per_s": self._rate.per_second(now),
            "num_tokens": self.num_tokens,
            "num_requests": self.num_requests,
            "ends": dict(self.ends),
            "conversions": dict(self.conversions),
            "refusals": dict(self.refusals),
            "num_bad_messages": self.num_bad_messages,
            "num_dropped_peers": self.num_dropped_peers,
            "time_to_first_token_ms": self.time_to_first_token.to_dict(),
            "inter_token_ms": self.inter_token.to_dict(),
            "queued_ms": self.queued.to_dict(),
            "duration_ms": self.duration.to_dict(),
        }
