"""The disk tier: contents of chunks in files, which outlive the process and may be shared by several.

A file holds one content: a line of JSON with the fingerprint of what may read it, its key and its size, then the
content, then a digest of all before. It is written under another name and renamed, so that none is ever seen in part;
one that is torn, altered or of another model is a miss. The directory is its owner's alone.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from lowlat.errors import ConfigError
from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["DiskTier"]

logger = logging.getLogger("lowlat.sequence.tiers")

SUFFIX = ".chunk"
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 4096
VERSION = 1


class DiskTier:
    """Contents of chunks in files of a directory, of at most so many bytes together; the oldest go first.

    directory    is made where it is missing; its mode must let nobody but its owner in
    fingerprint  what reads a content must have: another's is a miss
    Safe for one thread at a time in each of several processes. Raises ConfigError for a directory that cannot be used.
    """

    def __init__(self, directory: Path, max_bytes: int, fingerprint: str) -> None:
        self.max_bytes, self.fingerprint = max_bytes, fingerprint
        self.root = directory / fingerprint
        self._has_warned = False
        try:
            for folder in (directory, self.root):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_owner(folder)
            self.num_bytes = sum(size for _, size, _ in self._files())
        except OSError as error:
            raise ConfigError(f"cache_dir {directory} cannot be used: {error}") from error

    def __contains__(self, key: ChunkKey) -> bool:
        return self._path(key).exists()

    def read(self, key: ChunkKey) -> torch.Tensor | None:
        """The content of a key, [n] uint8, which is then the newest; None where there is none that is whole."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._miss(path, str(error))
            return None
        end = data.find(b"\n", 0, MAX_HEADER_BYTES)
        problem = None if end > 0 else "it has no header"
        if problem is None and data[:end] != self._header(key, len(data) - end - 1 - DIGEST_BYTES):
            problem = "its header is not that of this content"
        if (
            problem is None
            and hashlib.blake2b(data[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest() != data[-DIGEST_BYTES:]
        ):
            problem = "its digest is another's"
        if problem is not None:
            self.drop(key)
            self._miss(path, problem)
            return None
        with suppress(OSError):  # another process has taken it out
            os.utime(path)
        return torch.frombuffer(bytearray(data[end + 1 : -DIGEST_BYTES]), dtype=torch.uint8)

    def write(self, key: ChunkKey, content: torch.Tensor) -> None:
        """Keep a content, [n] uint8 on the CPU; the oldest files go where it leaves no space for them."""
        data = content.numpy().tobytes()
        if len(data) > self.max_bytes or key in self:
            return
        written = b"%s\n%s" % (self._header(key, len(data)), data)
        digest = _digest(written)
        try:
            self._make_space(len(written) + DIGEST_BYTES)
            with tempfile.NamedTemporaryFile(dir=self.root, delete=False) as file:  # mode 0600
                try:
                    file.write(written)
                    file.write(digest)
                    file.close()
                    os.replace(file.name, self._path(key))
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            self._miss(self._path(key), f"it cannot be written: {error}")
            return
        self.num_bytes += len(written) + DIGEST_BYTES

    def drop(self, key: ChunkKey) -> None:
        """Take a content out, if it is there."""
        self._unlink(self._path(key))

    def _header(self, key: ChunkKey, size: int) -> bytes:
        facts = {"lowlat": VERSION, "fingerprint": self.fingerprint, "digest": key.digest.hex(), "pool": key.pool}
        return json.dumps({**facts, "bytes": size}).encode()

    def _path(self, key: ChunkKey) -> Path:
        return self.root / f"{key.digest.hex()}{key.pool}{SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.root.glob(f"*{SUFFIX}"):
            try:
                facts = path.stat()
            except FileNotFoundError:  # another process has taken it out
                continue
            found.append((facts.st_mtime, facts.st_size, path))
        return sorted(found)

    def _make_space(self, size: int) -> None:
        files = self._files()  # other processes' are counted, too
        self.num_bytes = sum(each for _, each, _ in files)
        for _, each, path in files:
            if self.num_bytes + size <= self.max_bytes:
                return
            self._unlink(path, each)

    def _unlink(self, path: Path, size: int | None = None) -> None:
        try:
            size = path.stat().st_size if size is None else size
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self._miss(path, f"it cannot be taken out: {error}")
            return
        self.num_bytes -= size

    def _miss(self, path: Path, problem: str) -> None:
        """Say once that files cannot be used; what they hold is read by prefill again."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        logger.log(level, "cached prefix %s is not used: %s (cache_dir); others are not told of", path, problem)
        self._has_warned = True


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _check_owner(folder: Path) -> None:
    facts = folder.stat()
    if facts.st_uid != os.getuid():
        raise ConfigError(
            f"cache_dir {folder} belongs to user {facts.st_uid}, and this process is user {os.getuid()}'s"
        )
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(
            f"cache_dir {folder} lets others in (mode {stat.S_IMODE(facts.st_mode):o}), and it keeps what was asked: "
            "chmod 700 it, or name another"
        )
