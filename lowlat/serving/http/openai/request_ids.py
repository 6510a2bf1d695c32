"""This module adds the header x-request-id to every answer: the caller's own if it is plain, else a new one."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestIds"]

HEADER = b"x-request-id"
_PLAIN = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIds:
    """Adds the header to the answers of an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        own = given if _PLAIN.fullmatch(given) else f"req_{uuid.uuid4().hex}".encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, own)]}
            await send(message)

        await self._app(scope, receive, send_named)
