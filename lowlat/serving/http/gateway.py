"""The gateway's own state: its connection to the server, and what it remembers of it."""

import time
from typing import Any

from lowlat.ipc.client import AsyncClient
from lowlat.ipc.messages import Pong, Welcome
from lowlat.serving.http.errors import ApiError

__all__ = ["Gateway"]

STATS_S = 0.1  # whoever asks more often gets the same figures


class Gateway:
    """A connection to the server, made again where it was lost."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.created = int(time.time())
        self._pong: Pong | None = None
        self._pong_at = -STATS_S
        self._stats: dict[str, Any] = {}
        self._stats_at = -STATS_S

    async def server(self) -> Welcome:
        """The server's description. Raises ServerGone."""
        return await self.client.connect()

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
        """The server's state, at most 0.1 s old: anybody may ask. Raises ServerGone."""
        now = time.monotonic()
        if self._pong is None or now - self._pong_at >= STATS_S:
            self._pong = None  # what was known is not so where this fails
            self._pong = await self.client.health()
            self._pong_at = now
        return self._pong

    async def stats(self) -> dict[str, Any]:
        """The server's figures, at most 0.1 s old. Raises ServerGone."""
        now = time.monotonic()
        if now - self._stats_at >= STATS_S:
            self._stats = await self.client.stats()
            self._stats_at = now
        return self._stats
