"""An exchange gives the application access to a request's connection; only this gateway's server provides one."""

from collections.abc import Awaitable
from typing import Protocol

from starlette.types import Scope

__all__ = ["EXTENSION", "Exchange", "exchange_of"]

EXTENSION = "lowlat.exchange"  # its name among a scope's extensions


class Exchange(Protocol):
    """The part of a server's connection that is used while one request is answered."""

    def admit(self) -> bool:
        """Note that the caller has the key; False where so many callers are connected that this one cannot be."""

    def can_write(self) -> bool:
        """Whether a body in pieces can be sent, and the caller's socket takes more."""

    def begin(self, start: Awaitable[None], data: bytes) -> None:
        """Send a status and a first piece of the body at once, after `can_write` said so.

        start   `send` of the status, called and not awaited: middleware sees it as any other
        """

    def write(self, data: bytes) -> None:
        """Send a further piece at once, after `can_write` said so."""


def exchange_of(scope: Scope) -> Exchange | None:
    """Return the exchange of a request; None if the server provides none."""
    found: Exchange | None = scope.get("extensions", {}).get(EXTENSION)
    return found
