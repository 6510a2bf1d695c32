"""This module checks a hub's answers before they become a path, a size or a name.

huggingface_hub names files of its cache by headers: the blob by the ETag, the snapshot by the commit. A hub, or anyone
in between, may send anything there. `checked` refuses values that are not hashes, in every answer about a file.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any
from urllib.parse import urlsplit

from lowlat.checkpoint.json_file import shown
from lowlat.errors import ConfigError

__all__ = ["COMMIT", "ByteLimit", "checked", "read_listing"]

HASH = "[0-9a-f]{40}(?:[0-9a-f]{24})?"  # SHA-1 or SHA-256
COMMIT = re.compile(HASH)
ETAG = re.compile(HASH, re.IGNORECASE)
MAX_FILES = 1 << 16
MAX_FILE_BYTES = 1 << 50
MAX_NAME = 1024
_FILE: ContextVar[tuple[str, int] | None] = ContextVar("_FILE", default=None)  # the file of `checked`: name, bytes


def read_listing(info: Any, hub: str) -> tuple[str, dict[str, int]]:
    """Read a repository's commit, and the bytes of its files by name, from the hub's answer. Raises ConfigError.

    Names that lead out of a folder are left out: no file of a model has one.
    """
    commit, files = getattr(info, "sha", None), getattr(info, "siblings", None) or ()
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise ConfigError(f"{hub} says that the repository's commit is {shown(commit)}, which is no commit")
    if not isinstance(files, (list, tuple)) or len(files) > MAX_FILES:
        raise ConfigError(f"{hub} lists the repository's files as {shown(files)}; at most {MAX_FILES} are taken")
    sizes: dict[str, int] = {}
    for file in files:
        name, size = getattr(file, "rfilename", None), getattr(file, "size", None)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ConfigError(f"{hub} lists a file with the name {shown(name)}, which is no name")
        size = 0 if size is None else size
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
            raise ConfigError(f"{hub} lists {shown(name)} with the size {shown(size)}, which is no number of bytes")
        if _stays_inside(name):
            sizes[name] = size
    return commit, sizes


def _stays_inside(name: str) -> bool:
    return "\\" not in name and "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


class ByteLimit:
    """A count of the bytes of the file that is being fetched, which refuses a file that is longer than listed."""

    def __init__(self) -> None:
        self._name, self._left = _FILE.get() or ("", 0)
        self._limited = self._left > 0

    def add(self, count: float) -> None:
        """Count bytes; a negative count subtracts. Raises ConfigError for more bytes than the hub listed."""
        self._left -= int(count)
        if self._limited and self._left < 0:
            raise ConfigError(f"{self._name}: the hub sends more bytes than it listed for it")


@contextmanager
def checked(name: str, size: int) -> Iterator[None]:
    """Check every answer about a file that this thread gets while the context lasts.

    size  bytes of the file in the listing; 0: it has none
    Raises ConfigError for an ETag, commit or hash that is not a hash, for a longer file, and for a redirect to an
    address that is not http(s), or not encrypted though the hub's is.
    """
    _install()
    token = _FILE.set((name, size))
    try:
        yield
    finally:
        _FILE.reset(token)


@cache
def _install() -> None:
    """Wrap huggingface_hub's function for a file's metadata with checks: its cache's file names come from there."""
    from huggingface_hub import errors, file_download

    asked = file_download.get_hf_file_metadata

    @wraps(asked)
    def get_hf_file_metadata(url: str, *arguments: Any, **options: Any) -> Any:
        file = _FILE.get()
        if file is None:  # another download in this process, which is not lowlat's
            return asked(url, *arguments, **options)
        try:
            found = asked(url, *arguments, **options)
        except errors.RemoteEntryNotFoundError as error:  # this answer also names a folder of the cache
            _check_hash(file[0], "X-Repo-Commit", _commit_of(error.response.headers), COMMIT)
            raise
        _check_metadata(url, file, found)
        return found

    file_download.get_hf_file_metadata = get_hf_file_metadata


def _commit_of(headers: Mapping[str, str]) -> str | None:
    from huggingface_hub import constants

    return headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)


def _check_metadata(url: str, file: tuple[str, int], found: Any) -> None:
    name, size = file
    _check_hash(name, "ETag", found.etag, ETAG)
    _check_hash(name, "X-Repo-Commit", found.commit_hash, COMMIT)
    if found.xet_file_data is not None:
        _check_hash(name, "X-Xet-Hash", found.xet_file_data.file_hash, ETAG)
    if size and found.size is not None and found.size > size:
        raise ConfigError(f"{name}: the hub lists {size} bytes, and answers that it has {found.size}")
    scheme, first = urlsplit(found.location).scheme, urlsplit(url).scheme
    if scheme not in ("http", "https", "") or (first == "https" and scheme == "http"):
        raise ConfigError(f"{name}: the hub sends to {shown(found.location)}, which is not asked for it")


def _check_hash(name: str, header: str, value: str | None, pattern: re.Pattern[str]) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(f"{name}: the hub's answer has the {header} {shown(value)}; expected 40 or 64 hex digits")
