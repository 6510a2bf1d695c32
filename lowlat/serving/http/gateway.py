"""This module has the gateway's state: its connections to servers, one for each model, and recent answers of these."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from lowlat.errors import ServerGone
from lowlat.ipc.client import AsyncClient
from lowlat.ipc.messages import Pong, Welcome
from lowlat.serving.http.errors import ApiError
from lowlat.serving.models.roster import Listed, Roster

__all__ = ["Gateway", "Gateways", "OneModel", "SeveralModels", "gateways_of"]

ENDS = "the gateway ends"
STATS_S = 0.1  # within this time callers get the same figures
LOADING_RETRY_S = "5"


Value = TypeVar("Value")


class _Recent(Generic[Value]):
    """Keeps an answer of the server, and asks for it again when it is STATS_S old.

    Callers that come meanwhile wait for the same answer. All of them are one client to the server, which drops a client
    that asks too often.
    """

    def __init__(self, ask: Callable[[], Awaitable[Value]]) -> None:
        self._ask = ask
        self._found: tuple[Value, float] | None = None
        self._asking: asyncio.Task[Value] | None = None

    async def get(self) -> Value:
        """Return the answer. Raises what `ask` raises, in all waiting callers."""
        if self._asking is None:
            if self._found is not None and time.monotonic() - self._found[1] < STATS_S:
                return self._found[0]
            self._found = None  # forget the old answer, in case this fails
            self._asking = asyncio.get_running_loop().create_task(self._asked())
            self._asking.add_done_callback(_told)
        return await asyncio.shield(self._asking)

    async def _asked(self) -> Value:
        begun = time.monotonic()
        try:
            answer = await self._ask()
        finally:
            self._asking = None
        self._found = answer, begun
        return answer


def _told(asked: asyncio.Task[Any]) -> None:
    """Take an error that nobody waits for any more."""
    if not asked.cancelled():
        asked.exception()


class Gateway:
    """A connection to one model's server, which is made again after a loss.

    known  the server's last known description; None before the first connection
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.known: Welcome | None = None
        self.created = int(time.time())
        self._pong = _Recent(client.health)
        self._stats = _Recent(client.stats)

    async def server(self) -> Welcome:
        """The server's description. Raises ServerGone."""
        self.known = await self.client.connect()
        return self.known

    async def serving(self, model: str) -> Welcome:
        """The server's description, of the model that was asked for. Raises ApiError for another, ServerGone."""
        server = await self.server()
        if model != server.model:
            raise ApiError(
                404,
                f"the model {model!r:.120} does not exist; {server.model!r} does: name it in the field model, or serve "
                "it under the other name (lowlat serve --name)",
                param="model",
                code="model_not_found",
            )
        return server

    async def health(self) -> Pong:
        """Return the server's state, at most 0.1 s old; anybody may ask. Raises ServerGone."""
        return await self._pong.get()

    async def stats(self) -> dict[str, Any]:
        """Return the server's figures, at most 0.1 s old. Raises ServerGone."""
        return await self._stats.get()


class Gateways(ABC):
    """The models that can be asked for."""

    @abstractmethod
    async def of(self, model: str | None) -> Gateway:
        """The connection to a model's server; None: to the first one's that answers.

        Raises ApiError for a model that is not there, or not now.
        """

    @abstractmethod
    def listed(self) -> Sequence[Listed] | None:
        """The models and their states, as their supervisor says; None: there is none. Raises ServerGone."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection; what is under way is broken off, and its callers are told why."""


class OneModel(Gateways):
    """The model of one server."""

    def __init__(self, client: AsyncClient) -> None:
        self._gateway = Gateway(client)

    async def of(self, model: str | None) -> Gateway:
        """See Gateways; `Gateway.serving` refuses other names."""
        return self._gateway

    def listed(self) -> Sequence[Listed] | None:
        """See Gateways."""
        return None

    async def close(self) -> None:
        """See Gateways."""
        await self._gateway.client.close(ENDS)


class SeveralModels(Gateways):
    """The models of a supervisor, by its roster: each has a server of its own, which a request wakes."""

    def __init__(self, roster: Path) -> None:
        self._path = roster
        self._gateways: dict[str, Gateway] = {}  # by endpoint

    async def of(self, model: str | None) -> Gateway:
        """See Gateways."""
        listed = self.listed()
        if model is None:
            found = next((each for each in listed if each.answers), None) or listed[0]
        else:
            found = _named(listed, model)
        if not found.answers:
            why = f": {found.problem}" if found.problem else ""
            for_good = found.state == "failed"
            raise ApiError(
                503,
                f"the model {found.name!r:.120} cannot be asked now, it is {found.state}{why}",
                kind="server_error",
                code="model_failed" if for_good else "model_loading",
                headers={} if for_good else {"retry-after": LOADING_RETRY_S},
            )
        gateway = self._gateways.get(found.endpoint)
        if gateway is None:
            gateway = self._gateways[found.endpoint] = Gateway(AsyncClient(found.endpoint, name="lowlat http"))
        return gateway

    def listed(self) -> Sequence[Listed]:
        """See Gateways."""
        models = Roster.read(self._path).models
        if not models:
            raise ServerGone("the server has no models", code="gone")
        return models

    async def close(self) -> None:
        """See Gateways."""
        for gateway in self._gateways.values():
            await gateway.client.close(ENDS)


def gateways_of(request: Request) -> Gateways:
    """The models of the application that a request reached."""
    found: Gateways = request.app.state.gateways
    return found


def _named(listed: Sequence[Listed], model: str) -> Listed:
    found = next((each for each in listed if each.name == model), None)
    if found is None:
        known = ", ".join(repr(each.name) for each in listed)
        raise ApiError(
            404,
            f"the model {model!r:.120} does not exist; {known} do: name one in the field model",
            param="model",
            code="model_not_found",
        )
    return found
