"""This module reads the header x-session-id, with which a caller names the session of a request."""

import re

from starlette.requests import Request

from lowlat.ipc.messages import MAX_SESSION
from lowlat.serving.http.errors import ApiError

__all__ = ["session_of"]

HEADER = "x-session-id"
_PLAIN = re.compile(rf"[!-~]{{1,{MAX_SESSION}}}")


def session_of(request: Request) -> str:
    """Return the session's name, or "" without one. Raises ApiError for an invalid name."""
    name = request.headers.get(HEADER, "")
    if name and not _PLAIN.fullmatch(name):
        message = f"{HEADER} must have 1 to {MAX_SESSION} printable ASCII characters, without spaces"
        raise ApiError(400, message, param=HEADER, code="invalid_value")
    return name
