"""The right to talk to a server: the user behind a connection, and CURVE for tcp://. It knows no message."""

import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from lowlat.errors import ConfigError

__all__ = ["Credentials", "Curve", "Users"]

_UCRED = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Credentials:
    """The process at the other end of a connection, as its kernel says; None over tcp."""

    uid: int | None = None
    pid: int | None = None

    @classmethod
    def of(cls, connection: socket.socket) -> "Credentials":
        """Of the process that connected a Unix socket (SO_PEERCRED); a peer cannot set them itself."""
        pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return cls(uid=uid, pid=pid)


@dataclass(frozen=True)
class Users:
    """Whom a server lets in over ipc://.

    own      the server's own user, who alone may end it
    others   users that are let in beside it
    """

    own: int
    others: frozenset[int] = frozenset()

    def admits(self, uid: int | None) -> bool:
        """Whether this user may use the server."""
        return uid == self.own or uid in self.others


@dataclass(frozen=True)
class Curve:
    """CURVE for a server.

    certificate   the server's own, with its secret key, as zmq.auth.create_certificates writes it (*.key_secret)
    clients       directory of the public keys that are let in (*.key)
    """

    certificate: Path
    clients: Path

    def protect(self, context: "zmq.Context[zmq.Socket[bytes]]", server: "zmq.Socket[bytes]") -> ThreadAuthenticator:
        """Let in only known keys; the authenticator is to be stopped. Raises ConfigError for what cannot be read."""
        try:
            public, secret = zmq.auth.load_certificate(self.certificate)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read the CURVE certificate {self.certificate}: {type(error).__name__}"
            ) from error
        if secret is None:
            raise ConfigError(f"{self.certificate} holds no secret key; give the server's *.key_secret")
        if not self.clients.is_dir():
            raise ConfigError(f"{self.clients} is no directory; it holds the public keys of CURVE clients")
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=self.clients)
        server.curve_publickey, server.curve_secretkey = public, secret
        server.curve_server = True
        return authenticator
