"""This module runs the gateway's process: it starts uvicorn with the application, prints the address, and ends both."""

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import uvicorn

from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import EndpointLock, parse_endpoint
from lowlat.ipc.signals import ending_signals
from lowlat.serving.descriptors import raise_descriptor_limit
from lowlat.serving.http.acceptor import Acceptor
from lowlat.serving.http.app import make_app
from lowlat.serving.http.connections import Connection, ConnectionLimits, Connections
from lowlat.serving.http.gateway import Gateways

__all__ = ["Address", "bind", "check_free", "listening", "parse_address", "run"]

END_S = 2.0  # time to send answers after their last event
TICK_S = 1.0  # update interval of the Date header
POLL_S = 0.01
BACKLOG = 1024
OWN_DESCRIPTORS = 64  # descriptors besides connections: sockets to the server, pipes, logs
LOOPBACK = ("127.0.0.1", "localhost", "::1")

logger = logging.getLogger("lowlat.serving.http")


@dataclass(frozen=True)
class Address:
    """Where the gateway is bound.

    path  of a Unix socket, in place of host and port
    mode  of its file
    """

    host: str
    port: int
    path: Path | None = None
    mode: int = 0o600

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.path is not None or self.host in LOOPBACK

    def url(self) -> str:
        """Return the URL for a browser of this machine; for a Unix socket, the form that some clients know."""
        if self.path is not None:
            return f"http+unix://{quote(str(self.path), safe='')}"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def parse_address(text: str, socket_mode: str = "600") -> Address:
    """An address of the form [HOST:]PORT, the loopback by default, or unix:PATH, its file with a mode in octal digits.

    Raises ConfigError.
    """
    if text.startswith("unix:"):
        path = parse_endpoint(f"ipc://{Path(text.removeprefix('unix:')).absolute()}").path
        return Address("localhost", 0, path, int(socket_mode, 8))
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r:.80}: an IPv6 address stands in brackets: [::1]:8000")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ConfigError(f"{text!r:.80} is not [HOST:]PORT or unix:PATH, such as 8000 or 127.0.0.1:8000")
    return Address(host or LOOPBACK[0], int(port))


def check_free(address: Address) -> None:
    """Raise ConfigError if an address cannot be bound now."""
    with listening(address):
        pass


def run(
    gateways: Gateways,
    address: Address,
    *,
    key: str,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    opened: Callable[[Address], None],
    parent: int | None = None,
    limits: ConnectionLimits | None = None,
    drain_s: float = 0.0,
) -> None:
    """Serve until a signal of `ending_signals`, or until nothing holds the other end of a pipe any more.

    key, hosts, origins  see `make_app`
    opened   called with the address when connections are accepted; it has the chosen port
    parent   descriptor of the reading end of that pipe. The gateway then ignores signals, which a service manager may
             send to every process; so answers last as long as the server, which holds the other end, lets them
    limits   limits of connections
    drain_s  time for running answers after a signal; then they end with an error. A second signal ends all at once
    Raises ConfigError if the address cannot be bound.
    """
    limits = (limits or ConnectionLimits()).within(raise_descriptor_limit() - OWN_DESCRIPTORS)
    with listening(address) as (listener, address):
        if not address.local:
            logger.warning("%s is reached from other machines, without encryption", address.url())
        app = make_app(gateways, key=key, host=address.host, hosts=hosts, origins=origins)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # a stranger's wrong requests are not logged one by one
            access_log=False,
            server_header=False,
            ws="none",
            proxy_headers=False,
        )
        server = _Server(config, limits, gateways, drain_s, partial(opened, address))
        asyncio.run(server.run_until_ended(listener, parent))


class _Server(uvicorn.Server):
    """A server that ends cleanly on a signal (uvicorn raises the signal again), and limits its connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionLimits,
        gateways: Gateways,
        drain_s: float,
        opened: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._opened = opened
        self._places = Connections(limits)
        self._gateways = gateways
        self._drain_s = drain_s
        self._asked_to_end = asyncio.Event()
        self._acceptor: Acceptor | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run_until_ended`."""
        yield

    async def run_until_ended(self, listener: socket.socket, parent: int | None) -> None:
        """Serve until a signal, or the end of the parent."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in ending_signals():
                if parent is None:
                    loop.add_signal_handler(number, self.handle_exit, number, None)
                else:
                    signal.signal(number, signal.SIG_IGN)
        if parent is not None:
            loop.add_reader(parent, self._parent_ended, loop, parent)
        self._listener = listener
        await self.serve(sockets=[])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then take connections and say so: from then on a signal ends it well."""
        await super().startup(sockets)
        self._acceptor = Acceptor(self._listener, self._connection, self._places.drop_stranger, self._places.has_room)
        self._opened()

    async def main_loop(self) -> None:
        """Wait until the server is to end, and note it at once; meanwhile keep the Date header."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked_to_end.wait(), TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, at the second signal at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._asked_to_end.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, let answers under way end, and end those that take too long by an error."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if not await self._all_ended(self._drain_s):
            await self._gateways.close()
            self.force_exit = False
            if not await self._all_ended(END_S):
                for connection in self._places:
                    connection.abort()
                for task in list(self.server_state.tasks):
                    task.cancel()
        await self.lifespan.shutdown()

    async def _all_ended(self, within_s: float) -> bool:
        """Whether all connections are closed in time, before a second signal."""
        end = time.monotonic() + within_s
        while self.server_state.connections or self.server_state.tasks:
            if self.force_exit or time.monotonic() >= end:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _connection(self) -> Connection:
        return Connection(
            self._places, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def _parent_ended(self, loop: asyncio.AbstractEventLoop, parent: int) -> None:
        loop.remove_reader(parent)
        self._drain_s = END_S  # all answers have ended
        self.handle_exit(signal.SIGTERM, None)


@contextmanager
def listening(address: Address) -> Iterator[tuple[socket.socket, Address]]:
    """Return a listener, and its address with the chosen port. Raises ConfigError if it cannot be bound.

    The folder of a Unix socket must belong to this user. The modes of folder and file limit who can connect; requests
    need the key, too.
    """
    if address.path is None:
        with bind(address) as listener:
            yield listener, replace(address, port=listener.getsockname()[1])
        return
    lock = EndpointLock(address.path, shared=True, mode=address.mode)
    try:
        with lock.listen() as listener:
            yield listener, address
    finally:
        lock.release()


def bind(address: Address) -> socket.socket:
    """Return a listener whose accepted sockets send every event at once.

    asyncio sets TCP_NODELAY only if `socket.proto` says TCP, and `create_server` leaves that 0. On Linux accepted
    sockets inherit the listener's option. `::` is every address, those of IPv4 included.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    both = address.host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (address.host, address.port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        why = str(error.strerror).partition(" (while ")[0]  # the rest repeats the address
        privileged = "; a port below 1024 takes a privilege" if isinstance(error, PermissionError) else ""
        raise ConfigError(
            f"the HTTP gateway cannot listen at {address.host}:{address.port}: {why}{privileged}; choose another"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
