"""Small files of a model directory, read with a limit. The directory is untrusted."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from lowlat.errors import ConfigError

__all__ = ["read_bytes", "read_json", "read_text"]


def read_bytes(path: Path, max_bytes: int) -> bytes | None:
    """Return a file's bytes, None when there is none; ConfigError when it is no file or too large."""
    try:
        # without O_NONBLOCK a named pipe would block the open for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
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


def read_text(path: Path, max_bytes: int) -> str | None:
    """Return a file's text, None when there is none; ConfigError when it is not UTF-8."""
    data = read_bytes(path, max_bytes)
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: byte {error.start}") from error


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one when there is no file; ConfigError for anything else."""
    text = read_text(path, max_bytes)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error!s:.200}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value
