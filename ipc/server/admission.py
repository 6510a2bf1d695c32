"""This module decides who may connect to a server: by uid over ipc://, and by CURVE key over tcp://.

libzmq asks about every connection before it accepts a message of it (ZAP). Over ipc:// the question has the user and
the process that the kernel saw at the other end, over tcp:// the proven CURVE key. libzmq attaches the user id of the
answer to every message of the connection.
Source: https://rfc.zeromq.org/spec/27/.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from lowlat.errors import ConfigError

__all__ = ["Admission", "Curve", "User", "Users"]

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"lowlat"  # without a domain's name libzmq does not ask about connections without CURVE
VERSION = b"1.0"
MAX_ANSWERS = 64  # in a turn
_ADDRESS = re.compile(r".*:([0-9]+):[0-9]+:([0-9]+)")  # host, uid, gid, pid
_NOBLOCK = int(zmq.NOBLOCK)


@dataclass(frozen=True)
class User:
    """The user at the other end of a connection: by uid over ipc://, by CURVE key (Z85) over tcp://."""

    uid: int | None = None
    pid: int | None = None
    key: str | None = None

    @property
    def id(self) -> str:
        """The user id that libzmq attaches to messages: the account, and over ipc:// the process."""
        return self.account if self.uid is None else f"{self.account} {self.pid}"

    @cached_property
    def account(self) -> str:
        """The account, one for a uid or a key over all connections; it has the turns, shares and cached prefixes."""
        if self.uid is not None:
            return f"uid {self.uid}"
        return "anybody" if self.key is None else f"key {self.key}"

    @classmethod
    def of(cls, id: str) -> "User":
        """Return the user that has this `id`."""
        kind, *words = id.split(" ")
        if kind == "uid":
            return cls(uid=int(words[0]), pid=int(words[1]))
        return cls(key=words[0]) if kind == "key" else cls()


@dataclass(frozen=True)
class Users:
    """The users that a server admits over ipc://.

    own      the server's own user; only it may end the server
    others   the other admitted users
    """

    own: int
    others: frozenset[int] = frozenset()

    def admits(self, uid: int | None) -> bool:
        """Whether this user may use the server."""
        return uid == self.own or uid in self.others


@dataclass(frozen=True)
class Curve:
    """The CURVE keys of a server.

    certificate   the server's own, with its secret key, as zmq.auth.create_certificates writes it (*.key_secret)
    clients       directory with the public keys of admitted clients (*.key)
    """

    certificate: Path
    clients: Path

    def protect(self, socket: "zmq.Socket[bytes]") -> frozenset[str]:
        """Set a socket up for CURVE; returns the clients' keys (Z85). Raises ConfigError for unreadable files."""
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
        keys = zmq.auth.load_certificates(self.clients)
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_server = True
        return frozenset(key.decode("ascii") for key in keys)


class Admission:
    """Answers libzmq's questions about the connections of a ROUTER, in the thread that owns it.

    It must be made before the ROUTER binds.
    users   the users admitted over ipc://; None for tcp://
    curve   keys for tcp://; None admits everybody
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        users: Users | None,
        curve: Curve | None,
        log: logging.Logger,
    ) -> None:
        self._users = users
        self._log = log
        self._keys = None if curve is None else curve.protect(router)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.descriptor = int(self._socket.FD)

    def answer(self) -> bool:
        """Answer waiting questions; False if more may wait."""
        for _ in range(MAX_ANSWERS):
            try:
                question = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return True
            self._socket.send_multipart(self._reply(question))
        return False

    def close(self) -> None:
        """Close the socket; nobody is admitted after it."""
        self._socket.close()

    def _reply(self, question: Sequence[bytes]) -> list[bytes]:
        version, request, _, address, _, mechanism, *credentials = question
        try:
            if version != VERSION:
                raise _RefusedError(f"ZAP {version!r:.20} is not spoken")
            user = self._user(address.decode("ascii", "replace"), mechanism, credentials)
        except _RefusedError as error:
            self._log.warning("refused a connection", extra={"reason": str(error)})
            return [VERSION, request, b"400", b"refused", b"", b""]
        return [VERSION, request, b"200", b"", user.id.encode("ascii"), b""]

    def _user(self, address: str, mechanism: bytes, credentials: Sequence[bytes]) -> User:
        if self._users is not None:
            named = _ADDRESS.fullmatch(address)
            if named is None:
                raise _RefusedError("libzmq does not say whose it is")
            user = User(uid=int(named[1]), pid=int(named[2]))
            if not self._users.admits(user.uid):
                raise _RefusedError(f"uid {user.uid}, process {user.pid}, is not let in (allow_uids)")
            return user
        if self._keys is None:
            return User()
        key = z85.encode(credentials[0]).decode("ascii") if mechanism == b"CURVE" and credentials else ""
        if key not in self._keys:
            raise _RefusedError("its CURVE key is not known")
        return User(key=key)


class _RefusedError(Exception):
    """A connection is refused."""
