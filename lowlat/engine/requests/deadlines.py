"""This module keeps the deadlines of requests that wait for more of their prompt, or to be resumed."""

import time

__all__ = ["Deadlines"]


class Deadlines:
    """Keeps deadlines as times of the monotonic clock, by request id."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    @property
    def first(self) -> float | None:
        """The earliest deadline; None: no request waits."""
        return min(self._until.values(), default=None)

    def set(self, request_id: str, seconds: float) -> None:
        """Set a request's deadline to `seconds` from now."""
        self._until[request_id] = time.monotonic() + seconds

    def drop(self, request_id: str) -> None:
        """Drop a request's deadline, if it has one."""
        self._until.pop(request_id, None)

    def passed(self) -> list[str]:
        """The requests whose deadlines have passed."""
        if not self._until:
            return []
        now = time.monotonic()
        return [name for name, until in self._until.items() if until <= now]
