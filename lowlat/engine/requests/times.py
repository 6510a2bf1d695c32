"""This module keeps the moments of a request, and tells the durations between them."""

import time
from dataclasses import dataclass, field

__all__ = ["RequestTimes"]


@dataclass
class RequestTimes:
    """The moments of a request in seconds of the monotonic clock; None: it has not come to one.

    submitted    its caller submitted it
    placed       it got its slot
    prefilled    its first token came out of prefill
    first_token  its caller's first token came: a token that a stop string drops is none
    last_token   the last one so far
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
        """The durations of `RequestMetrics` by name; None: one that has not ended."""
        return {
            "queued_s": _between(self.submitted, self.placed),
            "prefill_s": _between(self.placed, self.prefilled),
            "time_to_first_token_s": _between(self.submitted, self.first_token),
            "decode_s": _between(self.prefilled, self.last_token),
        }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
