"""This module keeps the times of a request's events, and computes the durations between them."""

import time
from dataclasses import dataclass, field

__all__ = ["RequestTimes"]


@dataclass
class RequestTimes:
    """The times of a request's events, in seconds of the monotonic clock; None: an event has not happened.

    submitted    its caller submitted it
    placed       it got its slot
    prefilled    its first token came out of prefill
    first_token  the caller's first token came; tokens that a stop string drops do not count
    last_token   the caller's last token so far came
    """

    submitted: float = field(default_factory=time.monotonic)
    placed: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def saw_tokens(self, now: float) -> None:
        """Record that tokens came for the caller."""
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def durations(self) -> dict[str, float | None]:
        """The durations of `RequestMetrics` by name; None for one that has not ended."""
        return {
            "queued_s": _between(self.submitted, self.placed),
            "prefill_s": _between(self.placed, self.prefilled),
            "time_to_first_token_s": _between(self.submitted, self.first_token),
            "decode_s": _between(self.prefilled, self.last_token),
        }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
