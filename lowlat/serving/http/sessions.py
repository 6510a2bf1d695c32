"""The header x-session-id names the session that a request belongs to, as its caller calls it."""

import re

from starlette.requests import Request

from lowlat.ipc.messages import MAX_SESSION
from lowlat.serving.http.errors import ApiError

__all__ = ["session_of"]

HEADER = "x-session-id"
_PLAIN = re.compile(rf"[!-~]{{1,{MAX_SESSION}}}")


def session_of(request: Request) -> str:
    """The session's name; "" without one. Raises ApiError for one that is none."""
    name = request.headers.get(HEADER, "")
    if name and not _PLAIN.fullmatch(name):
        message = f"{HEADER} must have 1 to {MAX_SESSION} printable ASCII characters, without spaces"
        raise ApiError(400, message, param=HEADER, code="invalid_value")
    return name
