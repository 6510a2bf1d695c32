"""This module runs the tiers below the device's memory, host memory and files, for the books and the engine's thread.

Threads of its own copy from and to the device, and read and write files. The thread that steps gives them orders here,
and collects the copies that have ended.
"""

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from lowlat.errors import LowlatError
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.host import HostTier
from lowlat.sequence.tiers.key import COMING, ChunkKey, Copier, Load, Mark, Presence, Save
from lowlat.sequence.tiers.unwritten import Unwritten

__all__ = ["READ_AHEAD", "CacheTiers"]

logger = logging.getLogger("lowlat.sequence.tiers")

NUM_READERS = 8  # a core digests about 1 GB/s, and a disk gives several
READ_AHEAD = 24  # contents of a prompt that are read ahead from files
BATCH_BYTES = 64 << 20  # of copies to the device that start together; two batches are under way
TELL_S = 0.02  # the shortest time between news to waiting requests, which then look up their whole prompts
AHEAD_SHARE = 0.5  # of host memory, at most, for reads ahead: a request that waits for a content needs some
GRACE_S = 0.05  # a read waits so long for memory, even if no known copy or read will free any
MAX_ASKED = 1 << 16  # chunks whose times of use are remembered
Value = TypeVar("Value")
Job = Callable[[], object]
CopyJob = Callable[[], Job | None]  # starts a copy, and returns what waits for it


@dataclass
class Counts:
    """The tiers' figures since the load.

    hits, misses      contents found in host memory; contents whose file was missing or damaged
    read, saved       contents read from files; contents copied from the device
    bytes_in, _out    bytes copied to the device and from it
    copy_in_s, _out_s seconds that these copies took
    """

    hits: int = 0
    misses: int = 0
    read: int = 0
    saved: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    copy_in_s: float = 0.0
    copy_out_s: float = 0.0


class CacheTiers:
    """The two tiers: host memory, then files. The thread that steps calls the methods; `close` ends the tiers' threads.

    copier           copies between the device and host memory
    pins             the number of pins by chunk, which this class counts and both tiers read
    max_bytes_per_s  limit of the copies from and to the device, together; None: the speed of the bus
    """

    apart = True  # see `Source`: contents are copied to the device while others decode
    on_read: Callable[[], None] | None = None  # called in the tiers' threads when `num_read` has grown

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        copier: Copier,
        pins: "Counter[bytes] | None" = None,
        *,
        max_bytes_per_s: float | None = None,
    ) -> None:
        self._host, self._disk, self._copier = host, disk, copier
        self._pins = Counter[bytes]() if pins is None else pins
        self.max_bytes_per_s = max_bytes_per_s
        self._lock = threading.Condition(threading.RLock())
        self._coming: set[ChunkKey] = set()
        self._misread: set[ChunkKey] = set()  # those of `_coming` that were dropped meanwhile
        self._fresh: dict[ChunkKey, torch.Tensor] = {}  # read from files, and not yet asked for since
        self._wanted: set[ChunkKey] = set()  # a request asked for them before they were read
        self._ahead: dict[ChunkKey, int] = {}  # bytes of the reads ahead that are under way
        self._is_ahead_full = False  # a read ahead got no memory, and no content that was read has been taken since
        self._saving: set[ChunkKey] = set()
        self._absent: set[ChunkKey] = set()  # keys without a file that can be read
        self._dropping = Counter[ChunkKey]()  # orders to drop a wrong content that are not yet done
        self._asked: OrderedDict[bytes, tuple[int, int | None]] = OrderedDict()  # times of a chunk's last two requests
        self._done: list[object] = []  # holders of copies that have ended
        self._failed: list[object] = []  # holders of copies to the device that failed
        self._num_read = self._num_open = self._num_loads = 0
        self._told = 0.0
        self.counts = Counts()
        self._copies: queue.PriorityQueue[tuple[int, int, CopyJob | None]] = queue.PriorityQueue()
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_jobs = 0
        self._may_copy_at = 0.0
        self._unwritten = Unwritten()  # only the thread that writes uses it
        self._threads = [threading.Thread(target=self._run_copies, name="lowlat-cache-copies", daemon=True)]
        for run in () if disk is None else (self._run_writes, *[self._run_reads] * NUM_READERS):
            self._threads.append(threading.Thread(target=run, name="lowlat-cache-files", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def num_read(self) -> int:
        """A number that grows when reads or copies that were under way have ended, with a content or without."""
        return self._num_read

    @property
    def has_files(self) -> bool:
        """Whether contents go to files; then host memory is only a stage on the way, and each look-up takes time."""
        return self._disk is not None

    @property
    def num_loads(self) -> int:
        """Copies to the device that are under way."""
        return self._num_loads

    @property
    def under_way(self) -> bool:
        """Whether a read, or a copy from or to the device, has not ended: `num_read` grows when the last one does."""
        with self._lock:
            return bool(self._coming or self._num_loads or self._saving)

    def find(self, key: ChunkKey) -> torch.Tensor | Presence | None:
        """Return a content, [n] uint8 in host memory; COMING: it is being read from its file.

        None: it is in no tier.
        """
        return self._find(key)

    def read_ahead(self, keys: Iterable[ChunkKey]) -> None:
        """Read contents that will be asked for from their files, in order, up to the first without a file or memory."""
        wanted = dict.fromkeys(keys)
        with self._lock:
            for key in [each for each in self._fresh if each not in wanted]:  # contents for cancelled requests
                self._take_fresh(key)
        for key in wanted:
            is_full = self._is_ahead_full and (self._fresh or self._ahead)
            if is_full or self._find(key, ahead=True) is None:
                return

    def wait(self, timeout_s: float) -> None:
        """Wait until a read or a copy has ended, at most `timeout_s`; returns at once if none is under way."""
        with self._lock:
            if self.under_way:
                self._lock.wait(timeout_s)

    def has(self, key: ChunkKey) -> bool:
        """Whether a content is known to be in a tier, or on its way there."""
        with self._lock:
            if key in self._host or key in self._saving:
                return True
            if key in self._absent:  # its file is missing or could not be read: it must be written again
                return False
        return self._disk is not None and self._disk.is_whole(key)

    def has_space(self, pool: str, count: int) -> bool:
        """Whether host memory for `count` blocks or rows of a pool is free; always False if there are files."""
        with self._lock:
            return self._disk is None and self._host.has_space(self._copier.content_bytes(pool, count))

    def ask(self, digests: Iterable[bytes]) -> None:
        """Note that a prompt has these chunks.

        If a chunk was asked for before and is kept now, it takes the place only of contents not used since then.
        """
        with self._lock:
            for digest in digests:
                before = self._asked.pop(digest, (None, None))[0]
                self._asked[digest] = self._host.now, before
            while len(self._asked) > MAX_ASKED:
                self._asked.popitem(last=False)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Make the given contents the newest, as far as they are there, each newer than the one before."""
        with self._lock:
            for key in keys:
                self._host.touch(key)
            if self._disk is not None:
                self._num_open += 1
                self._writes.put(partial(self._touch_files, self._disk, keys))

    def copy_in(self, loads: Sequence[Load], mark: Mark) -> None:
        """Copy contents to their blocks, which no one else writes meanwhile; `take_done` returns their holders."""
        batch, size = list[Load](), 0
        for place, load in enumerate(loads):
            batch.append(load)
            size += load.content.numel()
            if size >= BATCH_BYTES or self.max_bytes_per_s is not None or place == len(loads) - 1:
                with self._lock:
                    self._num_loads += 1
                self._put_copy(0, partial(self._copy_in, batch, mark))
                batch, size = [], 0

    def copy_out(self, saves: Sequence[Save], mark: Mark) -> None:
        """Keep the contents of blocks, which no one writes meanwhile; `take_done` returns their holders."""
        for save in saves:
            with self._lock:
                self._saving.add(save.key)
                self._num_open += 1
            self._put_copy(1, partial(self._copy_out, save, mark))

    def put(self, key: ChunkKey, content: Callable[[], torch.Tensor], *, spare: bool = False) -> None:
        """Keep a content. The copy thread calls `content`, which waits for the copy from the device.

        spare  keep it only while host memory is free, and evict it before all others
        """
        with self._lock:
            self._saving.add(key)
            self._num_open += 1
        self._put_copy(1, lambda: partial(self._keep_read, key, content, spare))

    def take_done(self) -> list[object]:
        """Return the holders of copies that ended since the last call, each once for every such copy."""
        if not self._done:
            return []
        with self._lock:
            done, self._done = self._done, []
        return done

    def take_failed(self) -> list[object]:
        """Return the holders of copies to the device that failed since the last call; `take_done` has them, too."""
        if not self._failed:
            return []
        with self._lock:
            failed, self._failed = self._failed, []
        return failed

    def drop(self, key: ChunkKey) -> None:
        """Forget a wrong content in all tiers, and if it is on its way there."""
        with self._lock:
            self._dropping[key] += 1
            self._fresh.pop(key, None)
            if key in self._coming:
                self._misread.add(key)
            self._num_open += 1
        self._put_copy(1, lambda: partial(self._forget, key))

    def pin(self, digests: Sequence[bytes]) -> None:
        """Pin the contents of chunks: they are evicted after others."""
        with self._lock:
            self._pins.update(digests)

    def unpin(self, digests: Sequence[bytes]) -> None:
        """Undo one `pin` of these chunks."""
        with self._lock:
            self._pins.subtract(digests)
            for digest in digests:
                if self._pins[digest] <= 0:
                    del self._pins[digest]

    def stats(self) -> dict[str, Any]:
        """Return counts of contents, bytes, hits and copies, as JSON."""
        with self._lock:
            disk = {} if self._disk is None else {"disk_bytes": self._disk.num_bytes}
            held = {"host_chunks": len(self._host), "host_bytes": self._host.num_bytes, **disk}
            return {**held, "copies_under_way": self._num_loads + len(self._saving), **vars(self.counts)}

    def flush(self) -> None:
        """Wait until all orders are done: copies, reads and writes."""
        with self._lock:
            self._lock.wait_for(lambda: not (self._num_open or self._coming or self._num_loads))

    def close(self) -> None:
        """Finish all orders, retry the contents that could not be written, and end the threads."""
        self.flush()
        self._put_copy(2, None)
        for _ in self._threads:
            self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join()

    def _held(self, key: ChunkKey) -> torch.Tensor | None:
        """Return a content that is in host memory, unless it is being dropped."""
        if key in self._dropping:
            return None
        return self._host.get(key) if key in self._host else self._take_fresh(key)

    def _take_fresh(self, key: ChunkKey) -> torch.Tensor | None:
        content = self._fresh.get(key)
        if content is not None:
            del self._fresh[key]
            self._wanted.discard(key)
            self._is_ahead_full = False
            self._host.put(key, content)
        return content

    def _find(self, key: ChunkKey, *, ahead: bool = False) -> torch.Tensor | Presence | None:
        """Find a content, see `find`. It asks the file system without the lock: that may be slow, and others go on.

        ahead  it is a read ahead: no request asks for the content yet
        """
        for has_file in (False, True):
            with self._lock:
                if ahead and key in self._fresh:
                    return COMING
                content = self._held(key)
                if content is not None:
                    self.counts.hits += not ahead
                    return content
                if self._disk is None or key in self._dropping or key in self._absent:
                    return None
                if has_file or key in self._coming:
                    if not ahead:
                        self._wanted.add(key)
                    if key in self._coming:
                        return COMING
                    self._coming.add(key)
                    self._reads.put(partial(self._read, key, ahead=ahead))
                    return COMING
            if key not in self._disk:
                return None
        return None

    def _put_copy(self, priority: int, job: CopyJob | None) -> None:
        """Queue a copy; the lowest priority number, that of copies to the device, goes first."""
        with self._lock:
            self._num_jobs += 1
            self._copies.put((priority, self._num_jobs, job))

    def _run_copies(self) -> None:
        """Run copies in turn: start the next one before waiting for the last, so that the bus is never idle."""
        pending: Job | None = None
        while True:
            job, is_last = None, False
            if pending is None or not self._copies.empty():
                job = self._copies.get()[2]
                is_last = job is None
            started = None if job is None else _tried(job)
            if pending is not None:
                _tried(pending)
            if is_last:
                return
            pending = started

    def _run_reads(self) -> None:
        while (job := self._reads.get()) is not None:
            _tried(job)

    def _run_writes(self) -> None:
        """Write files in turn, and retry those that could not be written while there is nothing else to write."""
        while True:
            try:
                job = self._writes.get(timeout=self._unwritten.wait_s)
            except queue.Empty:
                _tried(self._write_again)
                continue
            if job is None:
                break
            _tried(job)
        while _tried(self._write_again):
            pass

    def _wait_for_turn(self, num_bytes: int) -> None:
        """Wait until the limit of bytes per second allows a copy, and count it."""
        if self.max_bytes_per_s is None:
            return
        now = time.monotonic()
        if now < self._may_copy_at:
            time.sleep(self._may_copy_at - now)
        self._may_copy_at = max(now, self._may_copy_at) + num_bytes / self.max_bytes_per_s

    def _tell(self) -> None:
        """Notify all that wait for contents; the caller holds the lock."""
        self._told = time.monotonic()
        self._num_read += 1
        self._lock.notify_all()
        if self.on_read is not None:
            self.on_read()

    def _end(self) -> None:
        """Count an order that is done; the caller holds the lock."""
        self._num_open -= 1
        self._lock.notify_all()

    def _read(self, key: ChunkKey, *, ahead: bool) -> None:
        content = None
        try:
            reserve = partial(self._reserve_ahead, key) if ahead else self._reserve
            content = None if self._disk is None else self._disk.read(key, reserve)
        finally:
            self._came(key, content, ahead=ahead)

    def _came(self, key: ChunkKey, content: torch.Tensor | None, *, ahead: bool) -> None:
        """Note a content that was read; None: it is not there, or could not be read.

        If a read ahead fails, a request that asks for the content reads it again.
        """
        with self._lock:
            self._coming.discard(key)
            self._ahead.pop(key, None)
            if content is None or key in self._misread:
                self._wanted.discard(key)
            if key in self._misread:
                self._misread.discard(key)
                self.counts.misses += 1
            elif content is not None:
                self.counts.read += 1
                self._fresh[key] = content
            elif not ahead:
                self.counts.misses += 1
                if key not in self._host:  # else it was saved meanwhile, and has or will have a file
                    self._absent.add(key)
            while len(self._fresh) > 2 * READ_AHEAD:  # contents for cancelled requests
                self._take_fresh(next(iter(self._fresh)))
            if not self._coming or time.monotonic() - self._told >= TELL_S:
                self._tell()
            self._lock.notify_all()

    def _reserve(self, size: int) -> torch.Tensor | None:
        """Take memory for a content that a request waits for.

        Waits for memory until copies to the device and reads ahead have ended, and GRACE_S longer.
        """
        until = 0.0
        with self._lock:
            while (memory := self._take_memory(size, keeps=self._wanted)) is None and size <= self._host.most_bytes:
                now = time.monotonic()
                if self._num_loads or self._ahead or not until:
                    until = now + GRACE_S
                if now >= until:
                    break
                self._lock.wait(GRACE_S / 10)
            return memory

    def _reserve_ahead(self, key: ChunkKey, size: int) -> torch.Tensor | None:
        """Take memory for a read ahead, within AHEAD_SHARE."""
        with self._lock:
            held = sum(self._ahead.values()) + sum(content.numel() for content in self._fresh.values())
            fits = held + size <= AHEAD_SHARE * self._host.capacity
            memory = self._host.reserve(size) if fits else None
            if memory is None:
                self._is_ahead_full = True
            else:
                self._ahead[key] = size
            return memory

    def _reserve_for(self, key: ChunkKey, size: int, *, spare: bool = False) -> torch.Tensor | None:
        """Take memory for a content from the device; if it goes to a file, it may take the place of any other."""
        with self._lock:
            if spare and not self._host.has_space(size):
                return None
            before = self._asked.get(key.digest, (0, None))[1]
            return self._take_memory(size, before if self._disk is None else None)

    def _take_memory(
        self, size: int, before: int | None = None, keeps: Collection[ChunkKey] = ()
    ) -> torch.Tensor | None:
        """Take memory of the tier; if none is left, contents that were read and not yet asked for may be evicted.

        keeps  the keys among these that stay
        """
        while (memory := self._host.reserve(size, before)) is None:
            key = next((each for each in reversed(self._fresh) if each not in keeps), None)
            if key is None:
                break
            self._take_fresh(key)
        return memory

    def _copy_in(self, loads: Sequence[Load], mark: Mark) -> Job:
        num_bytes = sum(load.content.numel() for load in loads)
        begun = time.monotonic()

        def start() -> Job:
            nonlocal begun
            self._wait_for_turn(num_bytes)
            begun = time.monotonic()
            return self._copier.start_in(loads, mark)

        def end(done: bool) -> None:
            holders = [load.holder for load in loads]
            with self._lock:
                self.counts.bytes_in += num_bytes
                self.counts.copy_in_s += time.monotonic() - begun
                self._failed += [] if done else holders
                self._done += holders
                self._num_loads -= 1
                if not self._num_loads:  # no request can go on before all loads have ended
                    self._tell()
                self._lock.notify_all()

        return _begun(start, end)

    def _copy_out(self, save: Save, mark: Mark) -> Job | None:
        content = None
        try:
            size = self._copier.content_bytes(save.key.pool, len(save.places))
            self._wait_for_turn(size)
            content = self._reserve_for(save.key, size)
        finally:
            if content is None:
                self._keep(save.key, None, save.holder)
        if content is None:
            return None
        begun = time.monotonic()

        def end(done: bool) -> None:
            self.counts.bytes_out += size
            self.counts.copy_out_s += time.monotonic() - begun
            self._keep(save.key, content if done else None, save.holder)

        return _begun(lambda: self._copier.start_out([save], [content], mark), end)

    def _keep_read(self, key: ChunkKey, content: Callable[[], torch.Tensor], spare: bool) -> None:
        """Wait for a content that is on its way from the device, and keep it in memory of the tier."""
        kept = None
        try:
            made = content()
            kept = self._reserve_for(key, made.numel(), spare=spare)
            if kept is not None:
                kept.copy_(made)
                self.counts.bytes_out += made.numel()
        finally:
            self._keep(key, kept, None, spare=spare)

    def _keep(self, key: ChunkKey, content: torch.Tensor | None, holder: object, *, spare: bool = False) -> None:
        """Note a content that has come from the device; None: there was no memory for it, or the copy failed."""
        with self._lock:
            self._saving.discard(key)
            self._absent.discard(key)
            if holder is not None:
                self._done.append(holder)
            if content is not None and key not in self._dropping:
                self._host.put(key, content, spare=spare)
                self.counts.saved += 1
            if not self._saving:
                self._tell()  # blocks that copies held are available again
            if content is None or self._disk is None:
                self._end()
                return
        self._writes.put(partial(self._write, key, content))

    def _write(self, key: ChunkKey, content: torch.Tensor) -> bool:
        with self._lock:
            if key in self._dropping:  # a later order drops it
                self._end()
                return False
        kept = False
        try:
            kept = self._disk is not None and self._disk.write(key, content)
        finally:
            self._unwritten.note(key, written=kept)
            with self._lock:
                if kept:
                    self._absent.discard(key)
                self._end()
        return kept

    def _write_again(self) -> bool:
        """Try to write the next unwritten content that is still in host memory; returns whether it was written."""
        with self._lock:
            found = self._unwritten.take(self._host.get)
            if found is None:
                return False
            self._num_open += 1
        return self._write(*found)

    def _forget(self, key: ChunkKey) -> None:
        with self._lock:
            self._host.drop(key)
        if self._disk is None:
            self._forgotten(key)
        else:
            self._writes.put(partial(self._forget_file, self._disk, key))

    def _touch_files(self, disk: DiskTier, keys: Sequence[ChunkKey]) -> None:
        try:
            disk.touch(keys)
        finally:
            with self._lock:
                self._end()

    def _forget_file(self, disk: DiskTier, key: ChunkKey) -> None:
        try:
            disk.drop(key)
        finally:
            self._forgotten(key)

    def _forgotten(self, key: ChunkKey) -> None:
        with self._lock:
            self._dropping[key] -= 1
            if not self._dropping[key]:
                del self._dropping[key]
            self._end()


def _begun(start: Callable[[], Job], end: Callable[[bool], None]) -> Job:
    """Start a copy; returns a function that waits for it, and then calls `end` with whether it succeeded.

    If the copy cannot be started, `end` is called at once.
    """
    try:
        wait = start()
    except BaseException:
        end(False)
        raise

    def finish() -> None:
        done = False
        try:
            wait()
            done = True
        finally:
            end(done)

    return finish


def _tried(job: Callable[[], Value]) -> Value | None:
    """Run a job, and log what it raises; its thread goes on, since requests wait for the orders after it.

    The job records its own end in any case. Prefill computes again what it could not copy.
    """
    try:
        return job()
    except (LowlatError, RuntimeError) as error:  # the device's, which the thread that steps also sees
        logger.warning("a part of the prefix cache is not kept: %s", error)
    except (OSError, MemoryError) as error:
        logger.warning("a part of the prefix cache is not kept: %s: %s", type(error).__name__, error)
    except Exception:
        logger.exception("a part of the prefix cache is not kept, by a fault of lowlat's")
    return None
