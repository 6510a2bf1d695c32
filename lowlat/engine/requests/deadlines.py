"""This module keeps the times until which requests wait for more of their prompt, or to be resumed."""

import time

__all__ = ["Deadlines"]


class Deadlines:
    """Times of the monotonic clock, by request id."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    @property
    def first(self) -> float | None:
        """The first of them; None: no request waits."""
        return min(self._until.values(), default=None)

    def set(self, request_id: str, seconds: float) -> None:
        """Let a request wait for so many seconds from now on."""
        self._until[request_id] = time.monotonic() + seconds

    def drop(self, request_id: str) -> None:
        """A request waits no more, if it did."""
        self._until.pop(request_id, None)

    def passed(self) -> list[str]:
        """The requests that have waited for too long."""
        if not self._until:
            return []
        now = time.monotonic()
        return [name for name, until in self._until.items() if until <= now]
