"""The server's log on stderr: text or JSON, one line a record, bounded and rate-limited; nobody ever waits for it.

A record is formatted by the thread that logs and written by another, so that an unread pipe stalls only the log: lines
beyond the queue are dropped and counted. Prompts and tokens are not to be logged by anybody.
"""

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

__all__ = ["ServingHandler", "formatter", "serving_log"]

MAX_LINES = 4096
MAX_LINE_CHARACTERS = 16_384
MAX_KEYS = 1024
BURST = 20.0
PER_SECOND = 5.0
FLUSH_S = 0.5
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "suppressed"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record was given as `extra`."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, message, the record's own fields, and a traceback's text."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, in ASCII."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if getattr(record, "suppressed", 0):
            line["suppressed"] = record.__dict__["suppressed"]
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line for people: time, level, message, the record's own fields; a traceback's lines follow."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; what a peer may have chosen cannot begin another."""
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        fields = "".join(f" {name}={value!r}" for name, value in _fields(record).items())
        if getattr(record, "suppressed", 0):
            fields += f" (and {record.__dict__['suppressed']} like it before)"
        line = f"{_time(record)} {record.levelname.lower()}: {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def formatter(log_format: str) -> logging.Formatter:
    """The formatter of a format's name, "json" or "text"."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


class _Bucket:
    """Lets a burst pass, then so many a second; counts what it holds back."""

    __slots__ = ("filled", "suppressed", "tokens")

    def __init__(self, now: float) -> None:
        self.tokens, self.filled, self.suppressed = BURST, now, 0

    def take(self, now: float) -> bool:
        self.tokens = min(BURST, self.tokens + (now - self.filled) * PER_SECOND)
        self.filled = now
        if self.tokens < 1.0:
            self.suppressed += 1
            return False
        self.tokens -= 1.0
        return True


class ServingHandler(logging.Handler):
    """Queues lines for a thread that writes them to a descriptor; records of one kind are rate-limited.

    descriptor   where to write; not closed
    A kind is the place in the code that logs.
    """

    def __init__(self, descriptor: int = 2, max_lines: int = MAX_LINES) -> None:
        super().__init__(logging.INFO)
        self._descriptor = descriptor
        self._is_terminal = descriptor == 2 and sys.stderr.isatty()
        self._lines: deque[bytes] = deque()
        self._max_lines = max_lines
        self._num_dropped = 0
        self._buckets: dict[tuple[str, int], _Bucket] = {}
        self._wake = threading.Event()
        self._closing = False
        self._writer = threading.Thread(target=self._write, name="lowlat-log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line, or drop it where the queue is full or its kind comes too often."""
        now = time.monotonic()
        kind = (record.pathname, record.lineno)
        bucket = self._buckets.get(kind)
        if bucket is None:
            if len(self._buckets) >= MAX_KEYS:
                self._buckets.clear()
            bucket = self._buckets[kind] = _Bucket(now)
        if not bucket.take(now):
            return
        if bucket.suppressed:
            record.suppressed, bucket.suppressed = bucket.suppressed, 0
        if len(self._lines) >= self._max_lines:
            self._num_dropped += 1
            return
        try:
            line = self.format(record)
        except Exception:  # a record that cannot be formatted must not end a thread that serves
            line = f"a log record of {record.pathname}:{record.lineno} could not be formatted"
        self._lines.append(line[:MAX_LINE_CHARACTERS].encode("utf-8", "replace") + b"\n")
        self._wake.set()

    @property
    def num_dropped(self) -> int:
        """Lines dropped because nobody reads the log."""
        return self._num_dropped

    def close(self) -> None:
        """Write what is queued, for half a second at most."""
        if not self._closing:
            self._closing = True
            self._wake.set()
            self._writer.join(FLUSH_S)
        super().close()

    def _write(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._lines:
                try:
                    self._put(self._lines.popleft())
                except OSError:
                    return  # nobody will ever read it
            if self._closing:
                return

    def _put(self, line: bytes) -> None:
        if self._is_terminal:
            print(line.decode(), end="", file=sys.stderr, flush=True)  # a bar that is being drawn makes room
            return
        view = memoryview(line)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                time.sleep(0.05)  # somebody made the file non-blocking


@contextmanager
def serving_log(log_format: str, descriptor: int = 2) -> Iterator[ServingHandler]:
    """Let the package's log go to stderr this way, in place of any handler before, as long as the context lasts."""
    logger, handler = logging.getLogger("lowlat"), ServingHandler(descriptor)
    handler.setFormatter(formatter(log_format))
    before, level, propagates = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)
        logger.propagate = propagates
        handler.close()
