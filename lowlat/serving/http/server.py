"""The gateway's process: uvicorn before the application, one line that says where it is, and its end."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from lowlat.errors import ConfigError
from lowlat.serving.descriptors import raise_descriptor_limit
from lowlat.serving.http.acceptor import Acceptor
from lowlat.serving.http.app import make_app
from lowlat.serving.http.connections import Connection, ConnectionLimits, Connections
from lowlat.serving.http.gateway import Gateways

__all__ = ["Address", "bind", "check_free", "parse_address", "run"]

SHUTDOWN_S = 2
BACKLOG = 1024
OWN_DESCRIPTORS = 64  # of the process next to connections: sockets to the server, pipes, logs
LOOPBACK = ("127.0.0.1", "localhost", "::1")

logger = logging.getLogger("lowlat.serving.http")


@dataclass(frozen=True)
class Address:
    """Where the gateway is bound."""

    host: str
    port: int

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in LOOPBACK

    def url(self) -> str:
        """Where a browser of this machine finds it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def parse_address(text: str) -> Address:
    """An address of the form [HOST:]PORT; the loopback by default. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r:.80}: an IPv6 address stands in brackets: [::1]:8000")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ConfigError(f"{text!r:.80} is not [HOST:]PORT, such as 8000 or 127.0.0.1:8000")
    return Address(host or LOOPBACK[0], int(port))


def check_free(address: Address) -> None:
    """Raise ConfigError where an address cannot be bound now."""
    bind(address).close()


def run(
    gateways: Gateways,
    address: Address,
    *,
    key: str,
    hosts: Iterable[str] = (),
    opened: Callable[[Address], None],
    parent: int | None = None,
    limits: ConnectionLimits | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, or until nothing holds the other end of a pipe any more.

    opened  called with the address when connections are accepted; its port is the one that was chosen
    parent  file descriptor of the reading end of that pipe
    limits  of connections
    Raises ConfigError where the address cannot be bound.
    """
    limits = (limits or ConnectionLimits()).within(raise_descriptor_limit() - OWN_DESCRIPTORS)
    with bind(address) as listener:
        address = Address(address.host, listener.getsockname()[1])
        if not address.local:
            logger.warning("%s is reached from other machines, without encryption", address.url())
        app = make_app(gateways, key=key, host=address.host, hosts=hosts)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # what strangers send wrongly is not worth a line each
            access_log=False,
            server_header=False,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        opened(address)
        asyncio.run(_Server(config, limits).run_until_ended(listener, parent))


class _Server(uvicorn.Server):
    """A server that a signal ends well (uvicorn's own raises the signal again) and that bounds its connections."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._places = Connections(limits)
        self._acceptor: Acceptor | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run_until_ended`."""
        yield

    async def run_until_ended(self, listener: socket.socket, parent: int | None) -> None:
        """Serve until a signal, or the end of the parent."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.handle_exit, number, None)
        if parent is not None:
            loop.add_reader(parent, self._parent_ended, loop, parent)
        self._listener = listener
        await self.serve(sockets=[])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then take connections."""
        await super().startup(sockets)
        self._acceptor = Acceptor(self._listener, self._connection, self._places.drop_stranger)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and let answers under way end."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener.close()
        await super().shutdown(sockets)

    def _connection(self) -> Connection:
        return Connection(
            self._places, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def _parent_ended(self, loop: asyncio.AbstractEventLoop, parent: int) -> None:
        self.should_exit = True
        loop.remove_reader(parent)


def bind(address: Address) -> socket.socket:
    """A listener whose accepted sockets send every event at once.

    asyncio sets TCP_NODELAY only where `socket.proto` says TCP, and `create_server` leaves that 0. Linux hands the
    listener's option on to what it accepts.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = str(error.strerror).partition(" (while ")[0]  # then comes the address, again
        privileged = "; a port below 1024 takes a privilege" if isinstance(error, PermissionError) else ""
        raise ConfigError(
            f"the HTTP gateway cannot listen at {address.host}:{address.port}: {why}{privileged}; choose another"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
