"""This module has a client's keys for CURVE."""

from dataclasses import dataclass, field

from lowlat.errors import ConfigError

__all__ = ["ClientCurve"]


@dataclass(frozen=True)
class ClientCurve:
    """Keys for CURVE, each 40 characters of Z85: the server's public key, and the client's own pair.

    Without a pair a new one is made; a server that lists its clients refuses it.
    """

    server_key: str
    public_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.public_key is None) != (self.secret_key is None):
            raise ConfigError("CURVE needs both public_key and secret_key, or neither")
        for name in ("server_key", "public_key", "secret_key"):
            key = getattr(self, name)
            if key is not None and not _is_key(key):
                raise ConfigError(f"{name} must be 40 characters of Z85")


def _is_key(key: object) -> bool:
    return isinstance(key, str) and len(key) == 40 and key.isascii() and key.isprintable() and " " not in key
