"""This module checks the Host header and the key before a request is read.

The Host must name this machine, because a page of another site can make its own name resolve to this machine (DNS
rebinding); its requests then have that name. Numeric addresses and names of the loopback cannot be rebound. A client
without a Host header, such as some health checks, is no browser.
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
    """Return the key in LOWLAT_API_KEY, or a new one, and whether it is new. Raises ConfigError for an invalid key."""
    key = environment.get(KEY_VARIABLE, "")
    return (checked_key(key), False) if key else (secrets.token_urlsafe(24), True)


def checked_key(key: str) -> str:
    """Return the key. Raises ConfigError if it is too short, or has characters that headers cannot have."""
    if len(key) < MIN_KEY:
        raise ConfigError(f"{KEY_VARIABLE} must have {MIN_KEY} characters at least, got {len(key)}")
    wrong = next((place for place, each in enumerate(key) if not "!" <= each <= "~"), None)
    if wrong is not None:
        raise ConfigError(
            f"{KEY_VARIABLE} must be of printable ASCII without spaces, and its character {wrong + 1} is none"
        )
    return key


def origins_of(text: str | None) -> list[str]:
    """Return the origins in a setting, separated by commas. Raises ConfigError for one that no browser would send."""
    origins = [each.strip() for each in (text or "").split(",") if each.strip()]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"http_origins: {origin!r:.100} is no origin, such as http://localhost:3000, or * for all"
            )
    return origins


class Guard:
    """Refuses requests with a wrong Host or key.

    key        the key of `Authorization: Bearer KEY`; None: no key is required
    host       the host that the gateway is bound to; None: behind a proxy, where any name is allowed
    hosts      further names under which clients reach it
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
    """Return the name in a Host header, without port, brackets and the root's dot."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _is_loopback(name: str) -> bool:
    """Return whether a name means this machine independently of name servers; 0.0.0.0 does, too."""
    address = _address(name)
    if address is None:
        return f".{name}".endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
