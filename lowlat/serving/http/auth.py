"""This module guards access by a Host header that names this machine, and by the key, before a request is read.

The Host is checked because a page of another site can have its own name resolve to this machine (DNS rebinding): its
requests then carry that name. An address in digits cannot be rebound, nor can names of the loopback; and what sends no
Host, as some health checks do, is no browser.
"""

import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from lowlat.errors import ConfigError
from lowlat.serving.http.errors import ApiError
from lowlat.serving.http.exchange import exchange_of

__all__ = ["KEY_VARIABLE", "Guard", "checked_key", "key_of", "origins_of"]

KEY_VARIABLE = "LOWLAT_API_KEY"
WILDCARDS = frozenset({"", "0.0.0.0", "::"})
MIN_KEY = 16
# browsers send names in small letters, and no port that is the scheme's own
_ORIGIN = re.compile(r"\*|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://[^/?#@\s,A-Z]+")


def key_of(environment: Mapping[str, str]) -> tuple[str, bool]:
    """The key in LOWLAT_API_KEY, else a new one; and whether it is new. Raises ConfigError for one that is none."""
    key = environment.get(KEY_VARIABLE, "")
    return (checked_key(key), False) if key else (secrets.token_urlsafe(24), True)


def checked_key(key: str) -> str:
    """The key, where it is one. Raises ConfigError for one too short, or with what headers do not carry."""
    if len(key) < MIN_KEY:
        raise ConfigError(f"{KEY_VARIABLE} must have {MIN_KEY} characters at least, got {len(key)}")
    wrong = next((place for place, each in enumerate(key) if not "!" <= each <= "~"), None)
    if wrong is not None:
        raise ConfigError(
            f"{KEY_VARIABLE} must be of printable ASCII without spaces, and its character {wrong + 1} is none"
        )
    return key


def origins_of(text: str | None) -> list[str]:
    """The origins in a setting, with commas between. Raises ConfigError for one that no browser would send."""
    origins = [each.strip() for each in (text or "").split(",") if each.strip()]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"http_origins: {origin!r:.100} is no origin, such as http://localhost:3000, or * for all"
            )
    return origins


class Guard:
    """Refuses requests with a wrong Host or key.

    key        of `Authorization: Bearer KEY`; None: nobody is asked for one
    host       where the gateway is bound; None: after a proxy, which any name may reach
    hosts      further names under which it is reached
    open_paths paths that need no key
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, host: str | None, hosts: Iterable[str], open_paths: Iterable[str]
    ) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        own = () if host is None or host in WILDCARDS else (host,)
        self._hosts = {name.lower() for name in (*hosts, *own)}
        self._any_name, self._any_address = host is None, host in WILDCARDS
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[bytes, bytes] = dict(scope["headers"])
            error = self._check_host(headers.get(b"host")) or self._check_key(scope, headers)
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, header: bytes | None) -> ApiError | None:
        if self._any_name or header is None:
            return None
        name = _host_name(header.decode("latin-1").lower())
        if name in self._hosts or _is_loopback(name) or (self._any_address and _address(name) is not None):
            return None
        return ApiError(
            403, f"the Host header names {name!r:.80}, which is not this gateway; --http-host adds names", code="host"
        )

    def _check_key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        exchange = exchange_of(scope)
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if self._key is not None and scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key):
            if exchange is None or exchange.admit():
                return None
            return ApiError(
                503,
                "all connections of the gateway are answering requests; come again later",
                kind="server_error",
                code="too_many_connections",
                headers={"retry-after": "1"},
            )
        if self._key is None or scope["path"] in self._open_paths:
            return None
        return ApiError(
            401,
            f"the key is wrong or missing: send Authorization: Bearer KEY ({KEY_VARIABLE}, or as printed at the start)",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _host_name(header: str) -> str:
    """The name in a Host header, without port, brackets and the root's dot."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _is_loopback(name: str) -> bool:
    """Whether a name means this machine whatever a name server says; 0.0.0.0 leads to it, too."""
    address = _address(name)
    if address is None:
        return f".{name}".endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
