"""The tiers below the device's memory, as the book of blocks and the steps know them.

A thread of its own waits for copies from the device, reads files and writes them.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from lowlat.errors import LowlatError
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.host import HostTier
from lowlat.sequence.tiers.key import COMING, ChunkKey, Presence

__all__ = ["CacheTiers"]

logger = logging.getLogger("lowlat.sequence.tiers")


class CacheTiers:
    """Host memory before files. The methods are for the thread that steps; `close` ends the tiers' own.

    pinned  makes host memory that a device copies from, [n] uint8, of a content that was read; None: it stays
    """

    def __init__(
        self, host: HostTier, disk: DiskTier | None, pinned: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self._host, self._disk, self._pinned = host, disk, pinned
        self._lock = threading.Condition()
        self._coming: set[ChunkKey] = set()
        self._saving: set[ChunkKey] = set()
        self._absent: set[ChunkKey] = set()  # asked for, and there was no file
        self._dropping: set[ChunkKey] = set()  # wrong, and not yet taken out everywhere
        self._num_read = 0
        self._counts = {"hits": 0, "read": 0, "misses": 0, "saved": 0}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lowlat-cache-tiers", daemon=True)
        self._thread.start()

    @property
    def num_read(self) -> int:
        """Reads from files that have ended: it grows whenever what was on its way has come, or is not there."""
        return self._num_read

    def find(self, key: ChunkKey) -> torch.Tensor | Presence | None:
        """A content, [n] uint8 in host memory, which is then the newest; COMING: it is read from its file from here on.

        None: it is in no tier.
        """
        with self._lock:
            if key in self._dropping:
                return None
            content = self._host.get(key)
            if content is not None:
                self._counts["hits"] += 1
                return content
            if key in self._coming:
                return COMING
            if self._disk is None or key in self._absent or key not in self._disk:
                return None
            self._coming.add(key)
        self._work.put(lambda: self._read(key))
        return COMING

    def wait(self, timeout_s: float) -> None:
        """Wait until a read has ended, at most so long; not at all where none is under way."""
        with self._lock:
            if self._coming:
                self._lock.wait(timeout_s)

    def wants(self, key: ChunkKey) -> bool:
        """Whether a content is in none of the tiers, so that it is worth a copy."""
        with self._lock:
            return not (key in self._host or key in self._saving or (self._disk is not None and key in self._disk))

    def put(self, key: ChunkKey, content: Callable[[], torch.Tensor]) -> None:
        """Keep a content. `content` is called in the tiers' own thread, and waits for the copy from the device."""
        with self._lock:
            self._saving.add(key)
        self._work.put(lambda: self._save(key, content))

    def drop(self, key: ChunkKey) -> None:
        """Forget a content that is wrong, wherever it is, or will be."""
        with self._lock:
            self._dropping.add(key)
        self._work.put(lambda: self._forget(key))

    def stats(self) -> dict[str, Any]:
        """Contents, bytes and hits, as JSON."""
        with self._lock:
            disk = {} if self._disk is None else {"disk_bytes": self._disk.num_bytes}
            return {"host_chunks": len(self._host), "host_bytes": self._host.num_bytes, **disk, **self._counts}

    def flush(self) -> None:
        """Wait until all that was put is kept."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    def close(self) -> None:
        """Keep all that was put, and end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                job()
            except (LowlatError, RuntimeError) as error:  # the device's, which whoever steps is told of, too
                logger.warning("a part of the prefix cache is not kept: %s", error)

    def _read(self, key: ChunkKey) -> None:
        content = None if self._disk is None else self._disk.read(key)
        if content is not None and self._pinned is not None:
            content = self._pinned(content)
        with self._lock:
            self._coming.discard(key)
            if content is None:
                self._absent.add(key)
            else:
                self._host.put(key, content)
            self._counts["misses" if content is None else "read"] += 1
            self._num_read += 1
            self._lock.notify_all()

    def _save(self, key: ChunkKey, content: Callable[[], torch.Tensor]) -> None:
        made = content()
        with self._lock:
            self._saving.discard(key)
            self._absent.discard(key)
            self._host.put(key, made)
            self._counts["saved"] += 1
        if self._disk is not None:
            self._disk.write(key, made)

    def _forget(self, key: ChunkKey) -> None:
        if self._disk is not None:
            self._disk.drop(key)
        with self._lock:
            self._host.drop(key)
            self._dropping.discard(key)
