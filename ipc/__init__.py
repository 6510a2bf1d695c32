"""This package has the wire format, the server and the clients.

Public names are imported on first use, so that a client does not load the server, and only AsyncClient loads asyncio.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowlat.errors import Busy, CapacityError, ConfigError, LowlatError, RequestError, ServerGone, StreamError
    from lowlat.ipc.chunk import Chunk
    from lowlat.ipc.client.asynchronous import AsyncClient
    from lowlat.ipc.client.blocking import Client
    from lowlat.ipc.client.curve import ClientCurve
    from lowlat.ipc.limits import Limits
    from lowlat.ipc.prompt_logprobs import PromptLogprobs
    from lowlat.ipc.server import Server

__all__ = [
    "AsyncClient",
    "Busy",
    "CapacityError",
    "Chunk",
    "Client",
    "ClientCurve",
    "ConfigError",
    "Limits",
    "LowlatError",
    "PromptLogprobs",
    "RequestError",
    "Server",
    "ServerGone",
    "StreamError",
]

_HOMES = {
    "AsyncClient": "lowlat.ipc.client.asynchronous",
    "Chunk": "lowlat.ipc.chunk",
    "Client": "lowlat.ipc.client.blocking",
    "ClientCurve": "lowlat.ipc.client.curve",
    "Limits": "lowlat.ipc.limits",
    "PromptLogprobs": "lowlat.ipc.prompt_logprobs",
    "Server": "lowlat.ipc.server",
}


if not TYPE_CHECKING:  # or type checkers would accept every name, with type Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'lowlat.ipc' has no attribute {name!r}")
        return getattr(import_module(_HOMES.get(name, "lowlat.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
