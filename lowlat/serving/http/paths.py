"""This module normalizes paths, as clients join them with base URLs in different ways."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Paths", "plain_path"]

_AUTHORITY = re.compile(r"\Ahttps?://[^/]*", re.IGNORECASE)
_SLASHES = re.compile("/{2,}")


def plain_path(path: str) -> str:
    """A path without what may stand before it (a scheme and a host, as proxies send it), and without empty parts."""
    return _SLASHES.sub("/", _AUTHORITY.sub("", path, count=1)).rstrip("/") or "/"


class Paths:
    """Gives an application plain paths: no redirect is needed, whose address would be wrong after a proxy with TLS."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (plain := plain_path(path)) != path:
            scope = {**scope, "path": plain}
        await self._app(scope, receive, send)
