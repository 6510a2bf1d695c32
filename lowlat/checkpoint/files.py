"""This module reads small untrusted files with a size limit and without blocking, and writes files atomically."""

import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from lowlat.errors import ConfigError

__all__ = [
    "decode_text",
    "find_bytes",
    "find_text",
    "read_bytes",
    "read_json",
    "read_text",
    "take_out_unfinished",
    "written_whole",
]

STALE_S = 60.0  # an unfinished file is removed so long after its last write, if its process is gone


def find_bytes(path: Path, max_bytes: int) -> bytes | None:
    """Read a file's bytes; None if it is missing. Raises ConfigError if it is no file, too large or unreadable."""
    try:
        # without O_NONBLOCK a named pipe would block the open for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"{str(path)!r:.80} is not a path: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: is not a regular file")
    with open(descriptor, "rb") as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: is larger than {max_bytes} bytes, the most that is read of such a file")
    return data


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a file's bytes. Raises ConfigError as `find_bytes` does, and if there is no file."""
    data = find_bytes(path, max_bytes)
    if data is None:
        raise ConfigError(f"{path}: no such file")
    return data


def decode_text(path: Path, data: bytes) -> str:
    """Decode a file's bytes. Raises ConfigError if they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: byte {error.start}") from error


def find_text(path: Path, max_bytes: int) -> str | None:
    """Read a file's text; None if it is missing. Raises ConfigError as `find_bytes` and `decode_text` do."""
    data = find_bytes(path, max_bytes)
    return None if data is None else decode_text(path, data)


def read_text(path: Path, max_bytes: int) -> str:
    """Read a file's text. Raises ConfigError as `read_bytes` and `decode_text` do."""
    return decode_text(path, read_bytes(path, max_bytes))


def read_json(path: Path, max_bytes: int) -> Any:
    """Read the JSON value in a file. Raises ConfigError as `read_text` does, and if it is not JSON."""
    try:
        return json.loads(read_text(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error!s:.200}") from error


@contextmanager
def written_whole(path: Path, prefix: str) -> Iterator[IO[bytes]]:
    """Open a new file for its owner alone (mode 600), which replaces `path` when it is completely written, or never.

    prefix  of its temporary name beside `path`, before the id of this process
    A process that is killed meanwhile leaves the file: see `take_out_unfinished`. Raises OSError.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{prefix}{os.getpid()}-", delete=False) as file:
        try:
            yield file
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def take_out_unfinished(folder: Path, prefix: str) -> int:
    """Remove unfinished files of `written_whole`, whose processes were killed; returns the bytes of those that stay.

    A file stays if its last write was in the last STALE_S, or if its process still runs. Raises OSError.
    """
    num_bytes = 0
    for path in folder.glob(f"{escape(prefix)}*"):
        found = re.fullmatch(r"(\d+)-[^-]+", path.name.removeprefix(prefix))
        with suppress(FileNotFoundError):
            facts = path.stat()
            is_stale = time.time() - facts.st_mtime > STALE_S
            if is_stale and found is not None and not _has_run_since(int(found[1]), facts.st_mtime):
                path.unlink()
            else:
                num_bytes += facts.st_size
    return num_bytes


def _has_run_since(pid: int, when: float) -> bool:
    """Whether this id's process was already running at `when`: each start of a container uses the same ids again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return False
    begun_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # start of the process, since boot
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + begun_s <= when
