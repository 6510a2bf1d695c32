"""This module reads JSON files of model directories as untrusted input: bounded, without duplicate keys."""

import json
from pathlib import Path
from typing import Any, NoReturn

from lowlat.checkpoint.files import read_bytes
from lowlat.errors import ConfigError

__all__ = ["parse_object", "read_object", "shown"]

MAX_DEPTH = 32
MAX_CONFIG_BYTES = 16 << 20
SHOWN_CHARACTERS = 80


class _DuplicateKeyError(ValueError):
    """An object names one key twice; the text is the key."""


def shown(value: object) -> str:
    """Return the value as an error message shows it, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DuplicateKeyError(key)
        values[key] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _check_depth(value: Any, label: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return
        level = deeper
    raise ConfigError(f"{label}: nested deeper than {MAX_DEPTH} levels")


def parse_object(data: bytes, label: str, *, take_infinity: bool = False) -> dict[str, Any]:
    """Decode one JSON object; label names the source in messages.

    take_infinity  accept NaN and Infinity; the reader of the key refuses them
    Raises ConfigError for anything that is not UTF-8, not JSON, not an object, holds NaN, Infinity, a duplicate
    key or more than 32 levels.
    """
    constants = float if take_infinity else _refuse_constant
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=constants)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ConfigError(f"{label}: nested deeper than {MAX_DEPTH} levels") from error
    except _DuplicateKeyError as error:
        raise ConfigError(f"{label}: the key {shown(error.args[0])} stands twice in one object") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{label}: not JSON at line {error.lineno} column {error.colno}") from error
    except ValueError as error:  # NaN, Infinity, or an integer of thousands of digits
        raise ConfigError(f"{label}: a number that cannot be used") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{label}: expected a JSON object, found {type(value).__name__}")
    _check_depth(value, label)
    return value


def read_object(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES, take_infinity: bool = False) -> dict[str, Any]:
    """Read and decode a JSON object from a regular file of at most max_bytes. Raises ConfigError as `parse_object`."""
    return parse_object(read_bytes(path, max_bytes), str(path), take_infinity=take_infinity)
