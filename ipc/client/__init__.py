"""This package has the clients of a lowlat server, a blocking one and one for asyncio; both share one protocol."""

from typing import TYPE_CHECKING, Any

from lowlat.ipc.chunk import Chunk
from lowlat.ipc.client.blocking import Client, Generation
from lowlat.ipc.client.curve import ClientCurve
from lowlat.ipc.client.open_prompt import AsyncOpenPrompt, OpenPrompt

if TYPE_CHECKING:
    from lowlat.ipc.client.asynchronous import AsyncClient, AsyncGeneration

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "AsyncOpenPrompt",
    "Chunk",
    "Client",
    "ClientCurve",
    "Generation",
    "OpenPrompt",
]


if not TYPE_CHECKING:  # else every name would be there, and of type Any

    def __getattr__(name: str) -> Any:
        """Load the asyncio client, and asyncio with it, on first use."""
        if name in ("AsyncClient", "AsyncGeneration"):
            from lowlat.ipc.client import asynchronous

            return getattr(asynchronous, name)
        raise AttributeError(f"module 'lowlat.ipc.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
