"""This module renders the figures of `lowlat top`: those of one server, or a line for each of several models."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lowlat.cli.console import format_bytes
from lowlat.errors import ServerGone
from lowlat.ipc import Client
from lowlat.serving.models.roster import Roster

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["OneServer", "SeveralServers", "Shown"]


class Shown(ABC):
    """The table that is shown, once or again and again."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """A snapshot as JSON. Raises ServerGone."""

    @abstractmethod
    def render(self) -> "RenderableType":
        """A snapshot for a terminal. Raises ServerGone."""


class OneServer(Shown):
    """The figures of one model's server, rendered by `render` from them and the endpoint."""

    def __init__(self, client: Client, render: "Callable[[dict[str, Any], str], RenderableType]") -> None:
        self._client, self._render = client, render

    def figures(self) -> dict[str, Any]:
        """See Shown."""
        return {"endpoint": self._client.endpoint, **self._client.stats()}

    def render(self) -> "RenderableType":
        """See Shown."""
        return self._render(self._client.stats(), self._client.endpoint)


class SeveralServers(Shown):
    """The models of a supervisor's roster; a context that closes its connections."""

    def __init__(self, roster: Path) -> None:
        self._roster = roster
        self._clients: dict[str, Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def figures(self) -> dict[str, Any]:
        """See Shown."""
        found = []
        for model in Roster.read(self._roster).models:
            own: dict[str, Any] = {"model": model.name, "state": model.state, "endpoint": model.endpoint}
            if model.problem is not None:
                own["problem"] = model.problem
            if model.answers:
                try:
                    own["stats"] = self._client(model.endpoint).stats()
                except ServerGone:  # it ends, and its supervisor does not know yet
                    own["state"] = "down"
            found.append(own)
        return {"models": found}

    def render(self) -> "RenderableType":
        """See Shown."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, title="models", title_justify="left", title_style="bold")
        for name in ("model", "state", "running", "waiting", "tokens/s", "memory", ""):
            table.add_column(name, justify="left" if name in ("model", "state", "") else "right")
        for own in self.figures()["models"]:
            stats = own.get("stats", {})
            sleep = stats.get("engine", {}).get("sleep", {})
            memory = format_bytes(sleep["device_bytes"]) if sleep and not sleep["asleep"] else ""
            counts = [str(stats.get(name, "")) for name in ("num_running", "num_waiting")]
            speed = f"{stats['tokens_per_s']:,.1f}" if "tokens_per_s" in stats else ""
            table.add_row(own["model"], own["state"], *counts, speed, memory, own.get("problem", ""))
        return table

    def _client(self, endpoint: str) -> Client:
        if endpoint not in self._clients:
            self._clients[endpoint] = Client(endpoint, name="lowlat top")
        return self._clients[endpoint]
