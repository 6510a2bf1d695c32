"""The disk tier keeps contents of chunks in files, which outlive the process and may be shared by several.

A file holds one content: a line of JSON with the fingerprint of what may read it, its key and its size, then the
content, then a digest of all before. It is written under another name and renamed, so that none is ever seen in part;
one that is torn, altered or of another model is a miss. The directory is its owner's alone.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import RawIOBase
from itertools import islice
from pathlib import Path

import torch

from lowlat.checkpoint.files import take_out_unfinished, written_whole
from lowlat.errors import ConfigError
from lowlat.options.directories import make_private
from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["DiskTier"]

logger = logging.getLogger("lowlat.sequence.tiers")

SUFFIX = ".chunk"
WRITING = ".writing-"  # before the number of the process that writes
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 4096
MAX_LISTED = 1024  # of the oldest files that are listed to be taken out: to list all takes 10 us a file
VERSION = 1


def _nothing(key: ChunkKey) -> bool:
    return False


class _DamagedError(Exception):
    """A file that is not as it was written."""


class DiskTier:
    """Contents of chunks in files of a directory, of at most so many bytes together; the oldest go first.

    directory    is made where it is missing; its mode must let nobody but its owner in
    fingerprint  what reads a content must have: another's is a miss
    is_pinned    whether a content is to stay
    Several threads of each of several processes may read; one thread of each writes. Raises ConfigError for a directory
    that cannot be used.
    """

    def __init__(
        self, directory: Path, max_bytes: int, fingerprint: str, is_pinned: Callable[[ChunkKey], bool] = _nothing
    ) -> None:
        self.max_bytes, self.fingerprint = max_bytes, fingerprint
        self.root = directory / fingerprint
        self.num_bytes = 0
        self._is_pinned = is_pinned
        self._has_warned = False
        self._seen = 0  # when the directory was changed last, as far as its files are counted
        self._oldest: deque[tuple[int, int, Path]] = deque()  # when they were counted last, the oldest first
        self._whole: set[ChunkKey] = set()  # this process has read or written their files
        self._lock = threading.Lock()
        for folder in (directory, self.root):
            make_private(folder, "cache_dir")
        try:
            self._count()
        except OSError as error:
            raise ConfigError(f"cache_dir {directory} cannot be used: {error}") from error

    def __contains__(self, key: ChunkKey) -> bool:
        return os.path.exists(self._path(key))

    def is_whole(self, key: ChunkKey) -> bool:
        """Whether there is a file of a content that this process has read or written."""
        return key in self._whole and key in self

    def read(self, key: ChunkKey, reserve: Callable[[int], torch.Tensor | None]) -> torch.Tensor | None:
        """The content of a key, which is then the newest; None where there is none that is whole, or no memory for it.

        reserve  gives memory for so many bytes, [n] uint8
        """
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                head = os.pread(file.fileno(), MAX_HEADER_BYTES, 0)
                end = head.find(b"\n")
                num_bytes = size - end - 1 - DIGEST_BYTES
                if end < 1 or num_bytes < 0:
                    raise _DamagedError("it is torn, or has no header")
                if head[:end] != self._header(key, num_bytes):
                    raise _DamagedError("its header is not that of this content")
                content = reserve(num_bytes)
                if content is None:
                    return None
                file.seek(end + 1)
                view = memoryview(content.numpy())  # type: ignore[arg-type]
                digest = hashlib.blake2b(head[: end + 1], digest_size=DIGEST_BYTES)
                if not _fill(file, view) or file.read(DIGEST_BYTES) != _digest_after(digest, view):
                    raise _DamagedError("its digest is another's")
        except FileNotFoundError:
            return None
        except (OSError, _DamagedError) as error:
            if isinstance(error, _DamagedError):
                self.drop(key)
            self._miss(path, str(error))
            return None
        with suppress(OSError):  # another process has taken it out
            os.utime(path)
        with self._lock:
            self._whole.add(key)
        return content

    def write(self, key: ChunkKey, content: torch.Tensor) -> bool:
        """Keep a content, [n] uint8 on the CPU; the oldest files go where it leaves no space for them.

        A file that is there is written over. Returns whether it is kept.
        """
        head = self._header(key, content.numel()) + b"\n"
        view = memoryview(content.numpy())  # type: ignore[arg-type]
        size = len(head) + len(view) + DIGEST_BYTES
        try:
            if not self._make_space(size):
                return False
            path = self._path(key)
            with written_whole(path, WRITING) as file:
                file.write(head)
                file.write(view)
                file.write(_digest_after(hashlib.blake2b(head, digest_size=DIGEST_BYTES), view))
                before = path.stat().st_size if path.exists() else 0
            with self._lock:
                self.num_bytes += size - before
                self._whole.add(key)
                self._seen = self.root.stat().st_mtime_ns
        except OSError as error:
            self._miss(self._path(key), f"it cannot be written: {error}")
            return False
        return True

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Make those of some contents that are there the newest, each newer than the one before."""
        begun = time.time_ns()  # the file system's own clock has one time for many files
        for place, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self._path(key), ns=(begun + place, begun + place))

    def drop(self, key: ChunkKey) -> None:
        """Take a content out, if it is there."""
        self._unlink(self._path(key))

    def _header(self, key: ChunkKey, size: int) -> bytes:
        facts = {"lowlat": VERSION, "fingerprint": self.fingerprint, "digest": key.digest.hex(), "pool": key.pool}
        return json.dumps({**facts, "bytes": size}).encode()

    def _path(self, key: ChunkKey) -> Path:
        return self.root / f"{key.digest.hex()}{key.pool}{SUFFIX}"

    def _files(self) -> list[tuple[int, int, Path]]:
        found = []
        for path in self.root.glob(f"*{SUFFIX}"):
            try:
                facts = path.stat()
            except FileNotFoundError:  # another process has taken it out
                continue
            found.append((facts.st_mtime_ns, facts.st_size, path))
        return sorted(found)

    def _count(self) -> None:
        """Count all files, other processes' and unfinished ones, too, and list the oldest whole ones that may go.

        What was left unfinished by processes that were killed goes.
        """
        changed, unfinished, files = (
            self.root.stat().st_mtime_ns,
            take_out_unfinished(self.root, WRITING),
            self._files(),
        )
        names = {path.name for _, _, path in files}
        with self._lock:
            self._seen, self.num_bytes = changed, unfinished + sum(size for _, size, _ in files)
            self._whole = {key for key in self._whole if self._path(key).name in names}
        self._oldest = deque(islice((each for each in files if not self._is_pinned(_key_of(each[2]))), MAX_LISTED))

    def _make_space(self, size: int) -> bool:
        """Take the oldest files out until so many bytes fit; False: they cannot.

        A file that was used, or pinned, since it was listed stays: it is not among the oldest any more.
        """
        if size > self.max_bytes:
            return False
        if self.root.stat().st_mtime_ns != self._seen:
            self._count()
        for may_count in (True, False):
            while self._oldest and self.num_bytes + size > self.max_bytes:
                changed, each, path = self._oldest.popleft()
                if not self._is_pinned(_key_of(path)) and _changed(path) == changed:
                    self._unlink(path, each)
            if self.num_bytes + size <= self.max_bytes:
                return True
            if may_count:
                self._count()
        return False

    def _unlink(self, path: Path, size: int | None = None) -> None:
        with self._lock:
            self._whole.discard(_key_of(path))
        try:
            size = path.stat().st_size if size is None else size
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self._miss(path, f"it cannot be taken out: {error}")
            return
        with self._lock:
            self.num_bytes -= size

    def _miss(self, path: Path, problem: str) -> None:
        """Say once, of whatever thread, that files cannot be used; what they hold is read by prefill again."""
        with self._lock:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
        logger.log(level, "cached prefix %s is not used: %s (cache_dir); others are not told of", path, problem)


def _digest_after(digest: "hashlib.blake2b", view: memoryview) -> bytes:
    """The digest of what was read and of what follows it; other threads run meanwhile."""
    digest.update(view)
    return digest.digest()


def _fill(file: RawIOBase, view: memoryview) -> bool:
    """Read until a view is full; False: the file ends before."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            return False
        done += count
    return True


def _changed(path: Path) -> int | None:
    """When a file was used last; None: it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _key_of(path: Path) -> ChunkKey:
    """The key of a file, by its name."""
    name = path.name.removesuffix(SUFFIX)
    try:
        return ChunkKey(bytes.fromhex(name[:64]), name[64:])
    except ValueError:  # somebody's own
        return ChunkKey(b"", name)
