"""This module shows the tiers below the device's memory to the book of blocks and to the steps.

Threads of their own copy from and to the device, read files and write them. Whoever steps puts orders here, and takes
what has been done.
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
READ_AHEAD = 24  # contents of a prompt that are read from files at a time
BATCH_BYTES = 64 << 20  # of copies to the device that are started at a time; two such are under way
TELL_S = 0.02  # so often, at most, are those who wait for files told of more: they look through all of a prompt
AHEAD_SHARE = 0.5  # of host memory, at most, that hold contents nobody has asked for yet: who waits for one needs some
GRACE_S = 0.05  # for which a read waits for memory that nobody is known to give back
MAX_ASKED = 1 << 16  # chunks of which it is known when they were asked for
Value = TypeVar("Value")
Job = Callable[[], object]
CopyJob = Callable[[], Job | None]  # starts a copy, and returns what waits for it


@dataclass
class Counts:
    """The tiers' figures since the load.

    hits, misses      contents found in host memory; asked for of a file, and not there or not whole
    read, saved       contents read from files; copied from the device
    bytes_in, _out    copied to the device and from it
    copy_in_s, _out_s for which such copies took
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
    """Host memory before files. The methods are for the thread that steps; `close` ends the tiers' own.

    copier           copies between the device and host memory
    pins             how often the contents of a chunk are pinned, which the tiers ask; this class counts them
    max_bytes_per_s  of copies from and to the device, together; None: as fast as the bus is
    """

    apart = True  # contents come to the device while others decode
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
        self._misread: set[ChunkKey] = set()  # of those, what has been dropped since
        self._fresh: dict[ChunkKey, torch.Tensor] = {}  # read from files, and not asked for since
        self._wanted: set[ChunkKey] = set()  # asked for before they came
        self._ahead: dict[ChunkKey, int] = {}  # bytes that reads ahead are filling
        self._is_ahead_full = False  # a read ahead was refused memory, and what was read has not been asked for since
        self._saving: set[ChunkKey] = set()
        self._absent: set[ChunkKey] = set()  # asked for, and there was no file
        self._dropping = Counter[ChunkKey]()  # wrong, and not yet taken out everywhere: orders of each
        self._asked: OrderedDict[bytes, tuple[int, int | None]] = OrderedDict()  # when chunks were, and the time before
        self._done: list[object] = []  # holders of copies that have ended
        self._failed: list[object] = []  # those of them whose content did not come to the device
        self._num_read = self._num_open = self._num_loads = 0
        self._told = 0.0
        self.counts = Counts()
        self._copies: queue.PriorityQueue[tuple[int, int, CopyJob | None]] = queue.PriorityQueue()
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_jobs = 0
        self._may_copy_at = 0.0
        self._unwritten = Unwritten()  # for the thread that writes
        self._threads = [threading.Thread(target=self._run_copies, name="lowlat-cache-copies", daemon=True)]
        for run in () if disk is None else (self._run_writes, *[self._run_reads] * NUM_READERS):
            self._threads.append(threading.Thread(target=run, name="lowlat-cache-files", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def num_read(self) -> int:
        """A number that grows whenever something that was under way has come, or is not there."""
        return self._num_read

    @property
    def has_files(self) -> bool:
        """Whether contents go to files: host memory is a way there then, and to look for each takes time."""
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
        """A content, [n] uint8 in host memory; COMING: it is read from its file from here on.

        None: it is in no tier.
        """
        return self._find(key)

    def read_ahead(self, keys: Iterable[ChunkKey]) -> None:
        """Have contents read from their files that will be asked for, as long as each is there, and memory for it."""
        wanted = dict.fromkeys(keys)
        with self._lock:
            for key in [each for each in self._fresh if each not in wanted]:  # others' who were cancelled meanwhile
                self._take_fresh(key)
        for key in wanted:
            is_full = self._is_ahead_full and (self._fresh or self._ahead)
            if is_full or self._find(key, ahead=True) is None:
                return

    def wait(self, timeout_s: float) -> None:
        """Wait until a read, or a copy from or to the device, has ended, at most so long; where none is, not at all."""
        with self._lock:
            if self.under_way:
                self._lock.wait(timeout_s)

    def has(self, key: ChunkKey) -> bool:
        """Whether a content is in one of the tiers, as far as is known, or on its way there."""
        with self._lock:
            if key in self._host or key in self._saving:
                return True
            if key in self._absent:  # its file, if there is one, could not be read: it is to be written again
                return False
        return self._disk is not None and self._disk.is_whole(key)

    def has_space(self, pool: str, count: int) -> bool:
        """Whether host memory is free for a content of so many blocks or rows of a pool, and is no way to files."""
        with self._lock:
            return self._disk is None and self._host.has_space(self._copier.content_bytes(pool, count))

    def ask(self, digests: Iterable[bytes]) -> None:
        """Note that a prompt has these chunks.

        Those that had been asked for, and are kept now, take the place of none that was used since.
        """
        with self._lock:
            for digest in digests:
                before = self._asked.pop(digest, (None, None))[0]
                self._asked[digest] = self._host.now, before
            while len(self._asked) > MAX_ASKED:
                self._asked.popitem(last=False)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Make those of some contents that are there the newest, each newer than the one before."""
        with self._lock:
            for key in keys:
                self._host.touch(key)
            if self._disk is not None:
                self._num_open += 1
                self._writes.put(partial(self._touch_files, self._disk, keys))

    def copy_in(self, loads: Sequence[Load], mark: Mark) -> None:
        """Copy contents to their blocks, which nobody writes meanwhile; `take_done` then names their holders."""
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
        """Keep what blocks hold, which nobody writes meanwhile; `take_done` then names their holders."""
        for save in saves:
            with self._lock:
                self._saving.add(save.key)
                self._num_open += 1
            self._put_copy(1, partial(self._copy_out, save, mark))

    def put(self, key: ChunkKey, content: Callable[[], torch.Tensor], *, spare: bool = False) -> None:
        """Keep a content. `content` is called in the tiers' own thread, and waits for the copy from the device.

        spare  it is kept where host memory is free, and goes before all others
        """
        with self._lock:
            self._saving.add(key)
            self._num_open += 1
        self._put_copy(1, lambda: partial(self._keep_read, key, content, spare))

    def take_done(self) -> list[object]:
        """The holders of copies that have ended since this was called last; several times where they hold several."""
        if not self._done:
            return []
        with self._lock:
            done, self._done = self._done, []
        return done

    def take_failed(self) -> list[object]:
        """The holders of copies to the device that failed since this was called last; `take_done` names them later."""
        if not self._failed:
            return []
        with self._lock:
            failed, self._failed = self._failed, []
        return failed

    def drop(self, key: ChunkKey) -> None:
        """Forget a content that is wrong, wherever it is, or will be."""
        with self._lock:
            self._dropping[key] += 1
            self._fresh.pop(key, None)
            if key in self._coming:
                self._misread.add(key)
            self._num_open += 1
        self._put_copy(1, lambda: partial(self._forget, key))

    def pin(self, digests: Sequence[bytes]) -> None:
        """Have the contents of chunks stay while others can go."""
        with self._lock:
            self._pins.update(digests)

    def unpin(self, digests: Sequence[bytes]) -> None:
        """Take a pin back that `pin` has given."""
        with self._lock:
            self._pins.subtract(digests)
            for digest in digests:
                if self._pins[digest] <= 0:
                    del self._pins[digest]

    def stats(self) -> dict[str, Any]:
        """Contents, bytes, hits and copies, as JSON."""
        with self._lock:
            disk = {} if self._disk is None else {"disk_bytes": self._disk.num_bytes}
            held = {"host_chunks": len(self._host), "host_bytes": self._host.num_bytes, **disk}
            return {**held, "copies_under_way": self._num_loads + len(self._saving), **vars(self.counts)}

    def flush(self) -> None:
        """Wait until all that was asked for is done: copied, read and written."""
        with self._lock:
            self._lock.wait_for(lambda: not (self._num_open or self._coming or self._num_loads))

    def close(self) -> None:
        """Keep all that was put, what could not be written before too where that is possible, and end the threads."""
        self.flush()
        self._put_copy(2, None)
        for _ in self._threads:
            self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join()

    def _held(self, key: ChunkKey) -> torch.Tensor | None:
        """A content that is in host memory, and not wrong."""
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
        """See `find`. The file system is asked without the lock: it may be slow, and copies and reads go on meanwhile.

        ahead  nobody asks for it yet
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
        """Queue a copy: those to the device go first."""
        with self._lock:
            self._num_jobs += 1
            self._copies.put((priority, self._num_jobs, job))

    def _run_copies(self) -> None:
        """Start copies in turn; before one is waited for the next is started, so that the bus has no pause."""
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
        """Write in turn; while nothing is to be written, what could not be written before is tried again."""
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
        """Wait until copies may go on, and count this one."""
        if self.max_bytes_per_s is None:
            return
        now = time.monotonic()
        if now < self._may_copy_at:
            time.sleep(self._may_copy_at - now)
        self._may_copy_at = max(now, self._may_copy_at) + num_bytes / self.max_bytes_per_s

    def _tell(self) -> None:
        """Let whoever waits look again; the lock is held."""
        self._told = time.monotonic()
        self._num_read += 1
        self._lock.notify_all()
        if self.on_read is not None:
            self.on_read()

    def _end(self) -> None:
        """An order is done; the lock is held."""
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
        """Note a content that was read; None: it is not there, or could not be read. Who asks for it reads again what
        could not be read ahead."""
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
                if key not in self._host:  # else it was saved meanwhile, and has a file, or will have one
                    self._absent.add(key)
            while len(self._fresh) > 2 * READ_AHEAD:  # of requests that were cancelled meanwhile
                self._take_fresh(next(iter(self._fresh)))
            if not self._coming or time.monotonic() - self._told >= TELL_S:
                self._tell()
            self._lock.notify_all()

    def _reserve(self, size: int) -> torch.Tensor | None:
        """Memory for a content that a request waits for: until copies to the device and reads ahead have ended, and a
        moment longer, there may be more."""
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
        """Memory for a content that nobody has asked for yet."""
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
        """Memory for a content from the device; what goes to a file passes through it in any case."""
        with self._lock:
            if spare and not self._host.has_space(size):
                return None
            before = self._asked.get(key.digest, (0, None))[1]
            return self._take_memory(size, before if self._disk is None else None)

    def _take_memory(
        self, size: int, before: int | None = None, keeps: Collection[ChunkKey] = ()
    ) -> torch.Tensor | None:
        """Memory of the tier; what was read, and nobody has taken since, goes as others do where none is left.

        keeps  but for these
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
                if not self._num_loads:  # before that nobody can go on
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
        """Keep a content that is on its way already, in memory of the tier."""
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
        """Note a content that has come from the device; None: there is no memory for it."""
        with self._lock:
            self._saving.discard(key)
            self._absent.discard(key)
            if holder is not None:
                self._done.append(holder)
            if content is not None and key not in self._dropping:
                self._host.put(key, content, spare=spare)
                self.counts.saved += 1
            if not self._saving:
                self._tell()  # blocks that were held may be others'
            if content is None or self._disk is None:
                self._end()
                return
        self._writes.put(partial(self._write, key, content))

    def _write(self, key: ChunkKey, content: torch.Tensor) -> bool:
        with self._lock:
            if key in self._dropping:  # by an order after this one
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
        """Try the next content that could not be written, while it is in host memory; returns whether it is kept."""
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
    """Start something; returns what waits for it and ends it, which is told whether it was done.

    Where it cannot be started it is ended at once.
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
    """Run a job, which notes its own end however it ends: what it could not copy is read by prefill again.

    Whatever it raises is named, and its thread goes on: requests wait for the orders after it.
    """
    try:
        return job()
    except (LowlatError, RuntimeError) as error:  # the device's, which whoever steps is told of, too
        logger.warning("a part of the prefix cache is not kept: %s", error)
    except (OSError, MemoryError) as error:
        logger.warning("a part of the prefix cache is not kept: %s: %s", type(error).__name__, error)
    except Exception:
        logger.exception("a part of the prefix cache is not kept, by a fault of lowlat's")
    return None
