"""This module writes the server's log to stderr, as text or JSON, limits lines and rates, and delays no other thread.

The thread that logs formats a record, and another thread writes it, so a pipe that nobody reads stalls only the log.
Lines beyond the queue are dropped and counted. No code may log prompts or tokens.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

__all__ = ["ServingHandler", "formatter", "serving_log"]

MAX_LINES = 4096
MAX_LINE_CHARACTERS = 16_384
MAX_KINDS = 1024
BURST = 20.0
PER_SECOND = 5.0
FLUSH_S = 0.5
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "suppressed"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that a record was given as `extra`."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, the record's own fields, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object in ASCII."""
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
    """Formats a record as a line for people: time, level, message, the record's own fields, then a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; newlines in it are escaped, as a peer may have chosen the text."""
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        fields = "".join(f" {name}={value!r}" for name, value in _fields(record).items())
        if getattr(record, "suppressed", 0):
            fields += f" (and {record.__dict__['suppressed']} like it before)"
        line = f"{_time(record)} {record.levelname.lower()}: {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def formatter(log_format: str) -> logging.Formatter:
    """Return the formatter with this name, "json" or "text"."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


class RateLimit(logging.Filter):
    """Passes a burst of records of one kind, then PER_SECOND a second; the next record has the number suppressed.

    A kind is a place in the code that logs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[tuple[str, int], tuple[float, float, int]] = {}  # tokens, time of filling, suppressed

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record passes."""
        now, kind = time.monotonic(), (record.pathname, record.lineno)
        if len(self._buckets) >= MAX_KINDS and kind not in self._buckets:
            self._buckets.clear()
        tokens, filled, suppressed = self._buckets.get(kind, (BURST, now, 0))
        tokens = min(BURST, tokens + (now - filled) * PER_SECOND)
        if tokens < 1.0:
            self._buckets[kind] = (tokens, now, suppressed + 1)
            return False
        if suppressed:
            record.suppressed = suppressed
        self._buckets[kind] = (tokens - 1.0, now, 0)
        return True


class ServingHandler(QueueHandler):
    """Formats records, and queues their lines for a thread that writes them; lines beyond `max_lines` are dropped.

    descriptor   where to write; not closed
    num_dropped  lines dropped because nobody reads the log
    """

    def __init__(self, descriptor: int = 2, max_lines: int = MAX_LINES) -> None:
        # an unlimited queue always takes the sentinel that ends the writer
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        super().__init__(self._lines)
        self.setLevel(logging.INFO)
        self.addFilter(RateLimit())
        self.num_dropped = 0
        self._max_lines = max_lines
        self._writer = _Writer(self._lines, descriptor)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> bytes:
        """Return the record's line."""
        try:
            line = self.format(record)
        except Exception:  # a record that cannot be formatted must not end a thread that serves
            line = f"a log record of {record.pathname}:{record.lineno} could not be formatted"
        return line[:MAX_LINE_CHARACTERS].encode("utf-8", "replace") + b"\n"

    def enqueue(self, record: Any) -> None:
        """Queue a line, or drop it."""
        if self._lines.qsize() < self._max_lines:
            self._lines.put(record)
        else:
            self.num_dropped += 1

    def close(self) -> None:
        """Write queued lines, for at most half a second."""
        self._writer.stop()
        super().close()


class _Writer(QueueListener):
    """Writes lines to a descriptor in a thread, until nobody can read them."""

    def __init__(self, lines: Any, descriptor: int) -> None:
        super().__init__(lines)
        self._descriptor = descriptor
        self._is_terminal = descriptor == 2 and sys.stderr.isatty()
        self._is_broken = False

    def start(self) -> None:
        """Start the thread."""
        super().start()
        if self._thread is not None:
            self._thread.name = "lowlat-log"

    def stop(self) -> None:
        """Let the thread write queued lines and end; unlike QueueListener.stop, this waits for at most FLUSH_S."""
        if self._thread is not None:
            self.enqueue_sentinel()
            self._thread.join(FLUSH_S)
            self._thread = None

    def handle(self, record: Any) -> None:
        """Write a line."""
        if self._is_broken:
            return
        try:
            self._put(record)
        except OSError:
            self._is_broken = True

    def _put(self, line: bytes) -> None:
        if self._is_terminal:
            print(line.decode(), end="", file=sys.stderr, flush=True)  # a progress bar moves out of the way
            return
        view = memoryview(line)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                time.sleep(0.05)  # somebody made the file non-blocking


@contextmanager
def serving_log(log_format: str, descriptor: int = 2) -> Iterator[ServingHandler]:
    """Write the package's log to a descriptor while the context lasts, in place of earlier handlers."""
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
