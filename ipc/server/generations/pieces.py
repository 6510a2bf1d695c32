"""This module keeps the pieces of an open prompt until a text thread tokenizes them; memory is that of their bytes."""

import threading
from collections import deque

from msgspec import Struct

from lowlat.ipc.wire import MAX_APPEND_BYTES

__all__ = ["Pieces", "Waiting"]


class Waiting(Struct, frozen=True):
    """Joined pieces of one kind, or the end of the prompt.

    content    text, or packed token ids; None: the prompt ends here
    num_bytes  bytes of it that count against the client's credit
    """

    content: str | bytes | None
    num_bytes: int = 0
    speculative: bool = False


class Pieces:
    """The pieces of a prompt that have come, in order, and the end if it has come.

    Consecutive pieces of text are joined, and so are those of token ids. The I/O thread adds, and a text thread takes.
    Each call returns whether the caller must put the prompt into the queue of text threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._content = bytearray()
        self._runs: deque[int] = deque()  # bytes of each run; negative for token ids
        self._end: Waiting | None = None
        self._num_uncounted = 0  # bytes at the front that do not count against the credit
        self._is_queued = False

    def add(self, piece: str | bytes, *, is_counted: bool) -> bool:
        """Add a piece, which withdraws an end on trial; returns whether to queue the prompt.

        is_counted  False: the piece came with the request and took no credit
        """
        is_text = isinstance(piece, str)
        data = piece.encode() if isinstance(piece, str) else piece
        with self._lock:
            self._end = None
            last = self._runs[-1] if self._runs else 0
            size = len(data)
            if last and (last > 0) == is_text and abs(last) + size <= MAX_APPEND_BYTES:
                size += abs(self._runs.pop())
            self._runs.append(size if is_text else -size)
            self._content += data
            self._num_uncounted += 0 if is_counted else len(data)
            return self._queue()

    def end(self, *, speculative: bool) -> bool:
        """End the prompt; speculative: on trial. Returns whether to queue the prompt."""
        with self._lock:
            self._end = Waiting(None, speculative=speculative)
            return self._queue()

    def take(self) -> tuple[Waiting | None, bool]:
        """Take the first pieces of one kind, or the end; returns them, or None, and whether more is left."""
        with self._lock:
            if not self._runs:
                found, self._end = self._end, None
                self._is_queued = False
                return found, False
            run = self._runs.popleft()
            data = bytes(self._content[: abs(run)])
            del self._content[: abs(run)]
            uncounted = min(self._num_uncounted, len(data))
            self._num_uncounted -= uncounted
            self._is_queued = bool(self._runs) or self._end is not None
            return Waiting(data.decode() if run > 0 else data, len(data) - uncounted), self._is_queued

    def clear(self) -> None:
        """Drop all pieces and the end."""
        with self._lock:
            self._content, self._end = bytearray(), None
            self._runs.clear()

    def _queue(self) -> bool:
        is_new, self._is_queued = not self._is_queued, True
        return is_new
