"""The disk tier keeps contents of chunks in files, which outlive the process; several processes may share them.

A file holds one content: a line of JSON with the fingerprint that its readers must have, its key and its size, then the
content, then a digest of all before. It is written under another name and renamed, so that no process sees a part of
it. A file that is torn, altered or of another model is a miss. Only the owner may open the directory.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import RawIOBase
from pathlib import Path

import torch

from lowlat.checkpoint.files import written_whole
from lowlat.errors import ConfigError
from lowlat.options.directories import make_private
from lowlat.sequence.tiers.file_budget import SUFFIX, WRITING, FileBudget
from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["DiskTier"]

logger = logging.getLogger("lowlat.sequence.tiers")

DIGEST_BYTES = 32
MAX_HEADER_BYTES = 4096
MIN_FORGOTTEN = 64  # removed files that may be remembered
VERSION = 1


def _nothing(key: ChunkKey) -> bool:
    return False


class _DamagedError(Exception):
    """A file is torn or altered, or is not of the content that its name says."""


class DiskTier:
    """Contents of chunks in files of a directory, of which the least recently used are evicted first.

    directory    is created if it is missing; its mode must admit only its owner
    max_bytes    the limit of all such files in it, of all fingerprints and processes
    fingerprint  identifies the model and the layout of contents; files with another one are misses
    is_pinned    whether a content must stay
    Several processes may use a directory, each with any number of threads that read and one that writes. Raises
    ConfigError for a directory that cannot be used.
    """

    def __init__(
        self, directory: Path, max_bytes: int, fingerprint: str, is_pinned: Callable[[ChunkKey], bool] = _nothing
    ) -> None:
        self.fingerprint = fingerprint
        self.root = directory / fingerprint
        self._has_warned = False
        self._whole: set[ChunkKey] = set()  # keys whose files this process has read or written
        self._lock = threading.Lock()
        for folder in (directory, self.root):
            make_private(folder, "cache_dir")
        try:
            self._budget = FileBudget(
                directory, self.root, max_bytes, lambda name: is_pinned(_key_of(name)), self._miss
            )
        except OSError as error:
            raise ConfigError(f"cache_dir {directory} cannot be used: {error}") from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in the directory, as far as this process has counted them."""
        return self._budget.num_bytes

    def __contains__(self, key: ChunkKey) -> bool:
        return os.path.exists(self._path(key))

    def is_whole(self, key: ChunkKey) -> bool:
        """Whether a content has a file, and this process has read or written it."""
        return key in self._whole and key in self

    def read(self, key: ChunkKey, reserve: Callable[[int], torch.Tensor | None]) -> torch.Tensor | None:
        """Read the content of a key, and make it the newest; returns None if no intact file or no memory is there.

        reserve  returns memory for a number of bytes, [n] uint8, or None
        """
        path, inode = self._path(key), 0
        try:
            with path.open("rb", buffering=0) as file:
                facts = os.fstat(file.fileno())
                size, inode = facts.st_size, facts.st_ino
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
            if isinstance(error, _DamagedError) and _is_at(path, inode):
                self.drop(key)
            self._miss(path, str(error))
            return None
        with suppress(OSError):  # another process has removed it
            os.utime(path)
        self._note_whole(key)
        return content

    def write(self, key: ChunkKey, content: torch.Tensor) -> bool:
        """Write a content, [n] uint8 on the CPU, over its file if there is one; the oldest files go if space is short.

        Returns whether it was written.
        """
        head = self._header(key, content.numel()) + b"\n"
        view = memoryview(content.numpy())  # type: ignore[arg-type]
        size = len(head) + len(view) + DIGEST_BYTES
        try:
            if not self._budget.make_space(size):
                return False
            path = self._path(key)
            self.root.mkdir(mode=0o700, exist_ok=True)  # another process may have removed it, empty
            with written_whole(path, WRITING) as file:
                self._budget.begin_file()
                file.write(head)
                file.write(view)
                file.write(_digest_after(hashlib.blake2b(head, digest_size=DIGEST_BYTES), view))
                self._budget.end_file()
            self._budget.add(path.name, size)
            self._note_whole(key)
        except OSError as error:
            self._miss(self._path(key), f"it cannot be written: {error}")
            return False
        return True

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Make the given contents the newest, as far as they have files, each newer than the one before."""
        begun = time.time_ns()  # the file system's own clock is too coarse to order files
        for place, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self._path(key), ns=(begun + place, begun + place))

    def drop(self, key: ChunkKey) -> None:
        """Remove a content's file, if there is one."""
        with self._lock:
            self._whole.discard(key)
        self._budget.take_out(self._path(key).name)

    def _note_whole(self, key: ChunkKey) -> None:
        """Note a file that was read or written; forget removed files when they are the majority."""
        with self._lock:
            self._whole.add(key)
            if len(self._whole) > 2 * self._budget.num_own + MIN_FORGOTTEN:
                names = self._budget.own_names()
                self._whole = {each for each in self._whole if self._path(each).name in names}

    def _header(self, key: ChunkKey, size: int) -> bytes:
        facts = {"lowlat": VERSION, "fingerprint": self.fingerprint, "digest": key.digest.hex(), "pool": key.pool}
        return json.dumps({**facts, "bytes": size}).encode()

    def _path(self, key: ChunkKey) -> Path:
        return self.root / f"{key.digest.hex()}{key.pool}{SUFFIX}"

    def _miss(self, path: Path, problem: str) -> None:
        """Warn once in a process that a file cannot be used; prefill computes its content again."""
        with self._lock:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
        logger.log(level, "cached prefix %s is not used: %s (cache_dir); others are not told of", path, problem)


def _digest_after(digest: "hashlib.blake2b", view: memoryview) -> bytes:
    """Return the digest of what was hashed before and of a view; other threads run meanwhile."""
    digest.update(view)
    return digest.digest()


def _fill(file: RawIOBase, view: memoryview) -> bool:
    """Read until a view is full; returns False if the file ends before."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            return False
        done += count
    return True


def _is_at(path: Path, inode: int) -> bool:
    """Whether the same file is still at a path: another may have replaced it while it was read."""
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


def _key_of(name: str) -> ChunkKey:
    """Return the key of a file by its name."""
    return ChunkKey(bytes.fromhex(name[:64]), name[64:].removesuffix(SUFFIX))
