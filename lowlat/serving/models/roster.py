"""A roster lists a supervisor's models in a file next to its endpoint, for gateways and commands.

The file is replaced as a whole, so a reader never sees half of it. It has the supervisor's process id, so readers
ignore the file of a supervisor that was killed.
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from lowlat.checkpoint.files import take_out_unfinished, written_whole
from lowlat.errors import ServerGone
from lowlat.ipc.endpoint import parse_endpoint

__all__ = ["Listed", "Roster", "roster_of", "roster_path"]

SUFFIX = ".models.json"


class Listed(msgspec.Struct, frozen=True):
    """A model's entry.

    state    "starting", "loading", "awake", "falling asleep", "asleep", "waking", "down" or "failed"
    problem  why it is down or failed
    pid      the id of its process, or None
    """

    name: str
    endpoint: str
    state: str
    problem: str | None = None
    pid: int | None = None

    @property
    def answers(self) -> bool:
        """Whether its server answers requests."""
        return self.state in ("awake", "falling asleep", "asleep", "waking")


class Roster(msgspec.Struct, frozen=True):
    """All models of one supervisor, in the order of its file."""

    pid: int
    models: tuple[Listed, ...]

    def write(self, path: Path) -> None:
        """Replace the file. Raises OSError."""
        take_out_unfinished(path.parent, ".models-")
        with written_whole(path, ".models-") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> "Roster":
        """Read a roster. Raises ServerGone if there is none, or its supervisor has ended."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
            with suppress(PermissionError):  # the process runs, as another user
                os.kill(found.pid, 0)
        except (OSError, msgspec.DecodeError) as error:
            raise ServerGone(f"no server of several models is there ({path})", code="gone") from error
        return found

    def find(self, name: str) -> Listed | None:
        """Return the model with this name, or None."""
        return next((model for model in self.models if model.name == name), None)


def roster_path(endpoint: str) -> Path | None:
    """Return the path of an endpoint's roster; None if the endpoint is no file."""
    own = parse_endpoint(endpoint).path
    return None if own is None else own.with_name(f"{own.stem}{SUFFIX}")


def roster_of(endpoint: str) -> Path | None:
    """Return the path of an endpoint's roster if a supervisor runs there, else None."""
    path = roster_path(endpoint)
    if path is None:
        return None
    try:
        Roster.read(path)
    except ServerGone:
        return None
    return path
