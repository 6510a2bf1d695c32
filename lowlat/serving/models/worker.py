"""A worker is a model's process as the supervisor sees it: it asks for memory, sleeps and wakes, and tells its state.

The process ends when the supervisor does.
"""

import os
import queue
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lowlat.errors import ConfigError
from lowlat.ipc.server.generations.residence import State
from lowlat.serving.config import ServeConfig
from lowlat.serving.models.channel import Channel

if TYPE_CHECKING:
    from lowlat.engine.memory.plan import DeviceNeed

__all__ = ["Serves", "Worker"]

ORPHANED = 1


class Serves(Protocol):
    """The part of a server that a supervisor's orders reach."""

    def reside(self, *, asleep: bool) -> None:
        """Let the engine sleep after its running requests, or wake it."""

    def drain(self, deadline_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish, and end."""


class Worker:
    """The worker's end of a channel; it is the server's keeper.

    descriptor  of the socket that was handed on
    """

    def __init__(self, descriptor: int) -> None:
        self._channel = Channel(socket.socket(fileno=descriptor))
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._server: Serves | None = None
        first = self._channel.receive()
        if not first:
            raise ConfigError("the supervisor has ended")
        self._given: dict[str, Any] = first[0]["settings"]
        threading.Thread(target=self._obey, name="lowlat-supervised", daemon=True).start()

    def settings(self) -> ServeConfig:
        """The settings of this process. Raises ConfigError."""
        return ServeConfig.gather(self._given, {})

    def reserve(self, needs: "Sequence[DeviceNeed]") -> None:
        """Wait until the supervisor grants memory on all devices. Raises ConfigError if it refuses."""
        self._channel.send({"event": "need", "devices": [list(need) for need in needs]})
        reply = self._replies.get()
        if reply["order"] == "refuse":
            raise ConfigError(reply["problem"])

    def serve(self, server: Serves, facts: dict[str, Any]) -> None:
        """Report that the model is ready, and obey orders from now on."""
        self._server = server
        self._channel.send({"event": "ready", "facts": facts})

    def failed(self, problem: str, *, for_good: bool) -> None:
        """Report why the process ends."""
        self._channel.send({"event": "failed", "problem": problem, "for_good": for_good})

    def wanted(self) -> None:
        """See lowlat.ipc.server.generations.residence.Keeper."""
        self._channel.send({"event": "wanted"})

    def told(self, state: State, *, idle: bool, problem: str) -> None:
        """See lowlat.ipc.server.generations.residence.Keeper."""
        self._channel.send({"event": "state", "state": state.name, "idle": idle, "problem": problem})

    def _obey(self) -> None:
        for message in self._channel.messages():
            server = self._server
            if message["order"] in ("load", "refuse"):
                self._replies.put(message)
            elif server is not None:
                server.reside(asleep=message["order"] == "sleep")
        if self._server is None:
            os._exit(ORPHANED)  # the supervisor is gone, and the model is still loading
        self._server.drain()
