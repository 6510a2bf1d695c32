"""How much a client says in a second."""

import time

__all__ = ["Rate"]

WINDOW_S = 1.0


class Rate:
    """Counts what comes, and asks for the time only where that is too much."""

    __slots__ = ("_count", "_end")

    def __init__(self) -> None:
        self._count = 0
        self._end = time.monotonic() + WINDOW_S

    def exceeds(self, limit: int) -> bool:
        """Count one; whether there were more than so many in this second."""
        self._count += 1
        if self._count <= limit:
            return False
        now = time.monotonic()
        late = now > self._end
        if late:
            self._count, self._end = 0, now + WINDOW_S
        return not late
