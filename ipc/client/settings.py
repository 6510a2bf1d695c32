"""This module checks the settings of both clients once, and times their attempts to connect."""

import math
import os
import time
from typing import TYPE_CHECKING

from lowlat.errors import ConfigError, LowlatError, RequestError, ServerGone
from lowlat.ipc.client.curve import ClientCurve
from lowlat.ipc.client.protocol import ClientProtocol
from lowlat.ipc.endpoint import check_owner, default_endpoint, parse_endpoint

if TYPE_CHECKING:
    from lowlat.ipc.client.dealer import Dealer

__all__ = ["RETRY_S", "Settings", "deadline_of"]

RETRY_S = 0.02
_MAX_NAME = 64
_MAX_WINDOW = (1 << 31) - 1


class Settings:
    """A client's options. Raises ConfigError for an invalid one."""

    def __init__(
        self,
        endpoint: str | None,
        name: str,
        connect_timeout_s: float,
        window: int,
        curve: ClientCurve | None,
        server_uid: int | None,
    ) -> None:
        self.endpoint = parse_endpoint(default_endpoint() if endpoint is None else endpoint)
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise ConfigError(f"name must be text of at most {_MAX_NAME} characters, got {name!r:.80}")
        if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= _MAX_WINDOW:
            raise ConfigError(f"window must be from 1 to {_MAX_WINDOW} tokens, got {window!r:.80}")
        if not _is_seconds(connect_timeout_s):
            raise ConfigError(f"connect_timeout_s must be a number of seconds above 0, got {connect_timeout_s!r:.80}")
        self.name = name
        self.window = window
        self.connect_timeout_s = connect_timeout_s
        self.curve = curve
        self._trusted = frozenset({0, os.geteuid(), *_server_uids(server_uid)})

    def open(self, now: float) -> "tuple[Dealer, ClientProtocol]":
        """Make a dealer that connects, and a protocol with HELLO to send.

        Raises ConfigError for an ipc:// endpoint that another user could have made, ServerGone if it does not exist.
        """
        from lowlat.ipc.client.dealer import Dealer  # libzmq is loaded when it is needed

        if self.endpoint.path is not None:
            try:
                check_owner(self.endpoint.path, self._trusted)
            except FileNotFoundError as error:
                raise ServerGone(f"{self.endpoint}: there is no such file", code="gone") from error
        return Dealer(self.endpoint, self.curve), ClientProtocol(str(self.endpoint), self.name, self.window, now)

    def unreachable(self, failure: LowlatError | None) -> ServerGone:
        """Return the error to raise when the time to connect is over; failure: the error of the last attempt."""
        why = "" if failure is None else f" ({failure})"
        keys = ""
        if self.endpoint.scheme == "tcp" and self.curve is None:
            keys = "; one that has CURVE keys answers nobody without: give curve=ClientCurve(...), or --curve-keys"
        return ServerGone(
            f"no lowlat server answers at {self.endpoint} within {self.connect_timeout_s:g} s "
            f"(connect_timeout_s){why}; `lowlat serve` starts one{keys}",
            code="gone",
        )


def _server_uids(server_uid: int | None) -> tuple[int, ...]:
    """Return the user that the caller or LOWLAT_SERVER_UID trusts, if any. Raises ConfigError for an invalid uid."""
    named: object = server_uid
    if server_uid is None:
        text = os.environ.get("LOWLAT_SERVER_UID", "")
        if not text:
            return ()
        named = int(text) if text.isascii() and text.isdigit() else text
    if isinstance(named, bool) or not isinstance(named, int) or named < 0:
        raise ConfigError(f"server_uid (LOWLAT_SERVER_UID) must be a user's number, got {named!r:.80}")
    return (named,)


def deadline_of(timeout_s: float | None) -> float | None:
    """Return the monotonic time at which a wait of timeout_s ends; None: never. Raises RequestError."""
    if timeout_s is None:
        return None
    if not _is_seconds(timeout_s):
        raise RequestError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r:.80}")
    return time.monotonic() + timeout_s


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
