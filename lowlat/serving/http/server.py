"""The gateway's process: uvicorn in front of the application, one line that says where it is, and its end."""

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
from lowlat.ipc.client import AsyncClient
from lowlat.serving.http.app import make_app

__all__ = ["Address", "check_free", "parse_address", "run"]

MAX_CONNECTIONS = 1000
SHUTDOWN_S = 2
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
    _bind(address).close()


def run(
    client: AsyncClient,
    address: Address,
    *,
    key: str,
    hosts: Iterable[str] = (),
    opened: Callable[[Address], None],
    parent: int | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, or until nothing holds the other end of a pipe any more.

    opened  called with the address when connections are accepted; its port is the one that was chosen
    parent  file descriptor of the reading end of that pipe
    Raises ConfigError where the address cannot be bound.
    """
    with _bind(address) as listener:
        address = Address(address.host, listener.getsockname()[1])
        if not address.local:
            logger.warning("%s is reached from other machines, without encryption", address.url())
        app = make_app(client, key=key, host=address.host, hosts=hosts)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        opened(address)
        asyncio.run(_Server(config).run_until_ended(listener, parent))


class _Server(uvicorn.Server):
    """A server that a signal ends well; uvicorn's own raises the signal again."""

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
        await self.serve(sockets=[listener])

    def _parent_ended(self, loop: asyncio.AbstractEventLoop, parent: int) -> None:
        self.should_exit = True
        loop.remove_reader(parent)


def _bind(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        why = str(error.strerror).partition(" (while ")[0]  # then comes the address, again
        privileged = "; a port below 1024 takes a privilege" if isinstance(error, PermissionError) else ""
        raise ConfigError(
            f"the HTTP gateway cannot listen at {address.host}:{address.port}: {why}{privileged}; choose another"
        ) from error
