"""Who may talk to a server: the user behind a connection, and CURVE for tcp://. It knows no message."""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from lowlat.errors import ConfigError

__all__ = ["Credentials", "Curve", "disconnect"]

_UCRED = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Credentials:
    """The process at the other end of a connection, as its kernel says; None over tcp."""

    uid: int | None = None
    pid: int | None = None

    @classmethod
    def of(cls, peer_address: str) -> "Credentials":
        """Read libzmq's Peer-Address: "name:uid:gid:pid" over ipc, from SO_PEERCRED; a peer cannot set it itself."""
        parts = peer_address.rsplit(":", 3)
        if len(parts) == 4 and all(part.isdigit() for part in parts[1:]):
            return cls(uid=int(parts[1]), pid=int(parts[3]))
        return cls()


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


def disconnect(descriptor: int, credentials: Credentials) -> bool:
    """End the connection of a peer that was dropped, which ZeroMQ itself has no call for; True if it was.

    descriptor   the connection's, when its last message came: it may have become another connection's since, so what
                 the kernel says of it must agree with the peer's credentials
    """
    if credentials.pid is None:
        return False
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)  # a file or a pipe by now
        return False
    with connection:
        try:
            pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if (pid, uid) != (credentials.pid, credentials.uid):
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
