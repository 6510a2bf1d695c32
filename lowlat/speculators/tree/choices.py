"""A choices table describes a speculation tree; this module reads it from YAML, TOML, JSON or a list.

A choices table lists every drafted node as its path of child ranks from the root: `[[0], [1], [0, 0]]` drafts the
likeliest and the second likeliest token, and then the likeliest token after the first. A file holds only the list
(YAML and JSON) or `{choices: [...]}`. Files are not trusted: their size, depth and number of values are limited before
anything is built from them. `tree.topology` checks whether a tree fits the limits of its runtime.
"""

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from lowlat.checkpoint.files import read_bytes
from lowlat.errors import ConfigError

__all__ = ["MAX_DEPTH", "MAX_NODES", "MAX_RANKS", "read_choices"]

MAX_DEPTH = 7
MAX_NODES = 64  # root included: a packed mask is one 64-bit word
MAX_RANKS = 16
MAX_FILE_BYTES = 64 * 1024
MAX_YAML_NODES = 1024  # 63 paths of at most 7 ranks need 506

Choices = tuple[tuple[int, ...], ...]


def read_choices(source: str | Path | Sequence[Sequence[int]]) -> Choices:
    """Read the choices of a file or list as tuples, in order, and check their types and sizes.

    Raises ConfigError, which names the file and the path that breaks a rule.
    """
    if isinstance(source, (str, Path)):
        return _check_choices(_unwrap(_read_file(Path(source)), str(source)), str(source))
    return _check_choices(source, "tree")


def _check_choices(choices: object, name: str) -> Choices:
    if not isinstance(choices, Sequence) or isinstance(choices, (str, bytes, bytearray)):
        raise ConfigError(f"{name}: choices must be a list of paths, got {type(choices).__name__}")
    if len(choices) >= MAX_NODES:
        raise ConfigError(f"{name}: {len(choices)} choices and the root exceed the {MAX_NODES} nodes of a tree")
    return tuple(_check_path(path, f"{name}: choices[{index}]") for index, path in enumerate(choices))


def _check_path(path: object, name: str) -> tuple[int, ...]:
    if not isinstance(path, Sequence) or isinstance(path, (str, bytes, bytearray)):
        raise ConfigError(f"{name} must be a list of child ranks, got {type(path).__name__}")
    if not path:
        raise ConfigError(f"{name} is empty; the root is in every tree and is not listed")
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{name} is {len(path)} deep; a tree is at most {MAX_DEPTH} deep")
    for rank in path:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ConfigError(f"{name} must hold integers, got {type(rank).__name__}")
        if not 0 <= rank < MAX_RANKS:
            raise ConfigError(f"{name}: ranks must be from 0 to {MAX_RANKS - 1}, got {_shown(rank)}")
    return tuple(path)


def _shown(number: int) -> str:
    return str(number) if abs(number) < 1 << 63 else "one of more than 63 bits"  # str() limits its digits


def _unwrap(content: object, name: str) -> object:
    if not isinstance(content, dict):
        return content
    if set(content) != {"choices"}:
        found = ", ".join(sorted(repr(key)[:40] for key in content)[:8])
        raise ConfigError(f"{name}: expected the one key 'choices', found {found or 'none'}")
    return content["choices"]


def _read_file(path: Path) -> object:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: a tree file must end in .yaml, .yml, .toml or .json")
    data = read_bytes(path, MAX_FILE_BYTES)
    try:
        return reader(data.decode("utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        # only the first line: a YAML error quotes the file
        reason = (str(error).splitlines() or [""])[0][:120]
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {type(error).__name__}: {reason}") from error


def _read_yaml(text: str) -> object:
    """Load YAML after a check of its events: no aliases, which can multiply without end, few values, little nesting."""
    num_nodes = depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("aliases are not allowed")
        if isinstance(event, yaml.NodeEvent):
            num_nodes += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if num_nodes > MAX_YAML_NODES or depth > 3:
            raise ValueError(f"more than {MAX_YAML_NODES} values, or nested deeper than a list of lists")
    return yaml.safe_load(text)


def _read_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key is given twice")
    return content


_READERS: dict[str, Callable[[str], object]] = {
    ".json": _read_json,
    ".toml": tomllib.loads,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}
