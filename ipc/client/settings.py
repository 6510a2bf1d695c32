"""The settings of both clients, checked once, and the clock of their attempts to connect."""

import math

from lowlat.errors import ConfigError, LowlatError, RequestError, ServerGone
from lowlat.ipc.client.curve import ClientCurve
from lowlat.ipc.client.protocol import Connection
from lowlat.ipc.client.transport import Transport
from lowlat.ipc.client.unix import UnixTransport
from lowlat.ipc.endpoint import default_endpoint, parse_endpoint

__all__ = ["RETRY_S", "Settings", "check_seconds"]

RETRY_S = 0.02
_MAX_NAME = 64
_MAX_WINDOW = (1 << 31) - 1


class Settings:
    """A client's options. Raises ConfigError for one that cannot be."""

    def __init__(
        self, endpoint: str | None, name: str, connect_timeout_s: float, window: int, curve: ClientCurve | None
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

    def open(self, now: float) -> tuple[Transport, Connection]:
        """Sockets that connect, and a connection whose HELLO waits to be sent."""
        return self._transport(), Connection(str(self.endpoint), self.name, self.window, now)

    def _transport(self) -> Transport:
        if self.endpoint.scheme == "ipc":
            return UnixTransport(self.endpoint)
        from lowlat.ipc.client.dealer import DealerTransport  # libzmq is loaded for those who need it

        return DealerTransport(self.endpoint, self.curve)

    def unreachable(self, failure: LowlatError | None) -> ServerGone:
        """The error to raise when the time to connect is over; failure is the error of the last attempt."""
        why = "" if failure is None else f" ({failure})"
        keys = ""
        if self.endpoint.scheme == "tcp" and self.curve is None:
            keys = "; one that has CURVE keys answers nobody without: give curve=ClientCurve(...), or --curve-keys"
        return ServerGone(
            f"no lowlat server answers at {self.endpoint} within {self.connect_timeout_s:g} s "
            f"(connect_timeout_s){why}; `lowlat serve` starts one{keys}",
            code="gone",
        )


def check_seconds(name: str, value: float | None) -> None:
    """Refuse a time to wait that is not one; None waits for ever. Raises RequestError."""
    if value is not None and not _is_seconds(value):
        raise RequestError(f"{name} must be a number of seconds above 0, got {value!r:.80}")


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
