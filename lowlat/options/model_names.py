"""This module tells model directories from repositories of the Hugging Face hub, `ORG/NAME[@REVISION]`.

A name that is an existing directory means that directory. This module downloads nothing.
"""

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Repository", "display_name", "find_repository"]

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@([\w-][\w./-]*))?", re.ASCII)
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)", re.ASCII)
DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class Repository:
    """A repository of the hub: `ORG/NAME`, and a branch, tag or commit."""

    name: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.name if self.revision == DEFAULT_REVISION else f"{self.name}@{self.revision}"


def find_repository(model: str | Path) -> Repository | None:
    """Return the repository that a model's name means; None for a directory, and for a name that can only be a path."""
    text = str(model)
    found = _NAME.fullmatch(text)
    if found is None or "--" in text or ".." in text or Path(text).exists():
        return None
    return Repository(found[1], found[2] or DEFAULT_REVISION)


def display_name(directory: Path) -> str:
    """Return the name of the model in a directory: its last part, or `ORG/NAME` in the hub's cache."""
    found = _SNAPSHOT.fullmatch(directory.parent.parent.name) if directory.parent.name == "snapshots" else None
    return directory.name if found is None else f"{found[1]}/{found[2]}"
