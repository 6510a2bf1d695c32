"""This module checks paths of the command line when they are parsed, before torch is imported.

It checks only the file system; the readers of files check their contents.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from lowlat.checkpoint.foreign import foreign_files
from lowlat.errors import ConfigError, RequestError
from lowlat.options.model_names import find_repository

__all__ = [
    "FILE",
    "FOLDER",
    "MODEL",
    "NEW_FILE",
    "NEW_FOLDER",
    "NEW_PATH",
    "NEW_RESULTS",
    "PLACE",
    "check_model",
    "check_new_folder",
    "check_tokenizer",
]

EXPECTED = "expected a Hugging Face model directory, or ORG/NAME of a repository"
# what tells a loader what a directory is that has no config.json, so that it can say so
TELLING = ("*.safetensors", "*.gguf", "*.bin", "adapter_config.json", "params.json")


def check_model(model: str | Path) -> None:
    """Raise ConfigError unless the path is a repository's name or a directory with a model."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").exists() and not _any(path, TELLING):
            raise ConfigError(f"{path}: has no config.json; {EXPECTED}")
    elif path.exists():
        raise ConfigError(f"{path}: {foreign_files([path.name]) or f'is a file; {EXPECTED}'}")
    elif find_repository(model) is None:
        raise ConfigError(f"{path}: no such directory; {EXPECTED}")


def check_tokenizer(model: str | Path, what: str) -> None:
    """Raise RequestError, by what needs it, for a model's directory without a tokenizer; a repository's loader does."""
    path = Path(model)
    if (path / "config.json").exists() and not (path / "tokenizer.json").exists():
        raise RequestError(f"{path}: {what} needs tokenizer.json in the model directory; give token ids")


def _any(directory: Path, patterns: Iterable[str]) -> bool:
    return any(next(directory.glob(pattern), None) is not None for pattern in patterns)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; a file is expected")
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path}: cannot be read: Permission denied")


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{path}: {'is a file; a directory is expected' if path.exists() else 'no such directory'}")


def _check_place(path: Path) -> None:
    """Results: a file, or a directory of them."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")


def _check_no_folder(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a directory; name a file")


def _check_new_path(path: Path) -> None:
    """Check a file whose folders are made with it."""
    _check_no_folder(path)
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{path} cannot be written: {above} is no directory")


def _check_new_file(path: Path) -> None:
    _check_no_folder(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {path.parent}")
    _check_writable(path if path.exists() else path.parent, path)


def check_new_folder(path: Path) -> None:
    """Raise ConfigError for a folder that cannot be made or written to."""
    above = path
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise ConfigError(f"{path} cannot be made: {above} is a file")
    _check_writable(above, path)


def _check_new_results(path: Path) -> None:
    """Check a file of results that goes on, or is made, where the name ends in .json; else their folder."""
    if path.suffix != ".json":
        return check_new_folder(path)
    _check_new_path(path)
    return _check_writable(next(each for each in (path, *path.absolute().parents) if each.exists()), path)


def _check_writable(existing: Path, path: Path) -> None:
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"{path} cannot be written: {existing} is not yours to write")


class _Checked(click.Path):
    """A path that a function checks; its ConfigError is what the user reads."""

    def __init__(self, check: Any) -> None:
        super().__init__(path_type=Path)
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises ConfigError."""
        path = super().convert(value, param, ctx)
        try:
            self._check(path)
        except (OSError, ValueError) as error:  # a name too long, a null byte, a folder that may not be searched
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{str(path)!r:.200} cannot be used as a path: {reason}") from error
        return path


MODEL = _Checked(check_model)
FILE = _Checked(_check_file)
FOLDER = _Checked(_check_folder)
PLACE = _Checked(_check_place)
NEW_FILE = _Checked(_check_new_file)
NEW_PATH = _Checked(_check_new_path)
NEW_FOLDER = _Checked(check_new_folder)
NEW_RESULTS = _Checked(_check_new_results)
