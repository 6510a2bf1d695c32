"""This module has the fixtures of tests over sockets: a check for leaks, and servers in this process."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, ipc_url
from served import Maker, Serve, Served, serve_in

from lowlat.ipc.client import protocol
from lowlat.ipc.limits import Limits

__all__ = ["OVER_EACH", "no_leaks", "open_descriptors", "serve", "server", "soon", "transport"]

SETTLE_S = 5.0


def open_descriptors() -> dict[str, str]:
    """Return the open descriptors of this process, by number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this very listing
    return {name: target for name, target in found.items() if not target.startswith("/proc/")}


def _context_threads() -> dict[str, str]:
    """ZeroMQ's own threads, two for each context that has had a socket; one without shows as descriptors."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue  # a thread that ended meanwhile
        if name.startswith("ZMQbg/"):
            found[task] = name
    return found


def _settled_context_threads() -> dict[str, str]:
    """The same where nothing changes: a thread names itself after it began, and a listing may miss some while another
    one ends."""
    end, found = time.monotonic() + SETTLE_S, _context_threads()
    while time.monotonic() < end:
        time.sleep(0.002)
        before, found = found, _context_threads()
        if found == before and len(found) % 2 == 0:
            break
    return found


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a ZeroMQ context, a thread or a descriptor after."""
    contexts = _settled_context_threads()
    descriptors, threads = open_descriptors(), _threads()
    yield
    end = time.monotonic() + SETTLE_S
    while True:
        leaked: dict[str, Any] = {
            "descriptors": {k: v for k, v in open_descriptors().items() if descriptors.get(k) != v},
            "threads of contexts": {k: v for k, v in _context_threads().items() if k not in contexts},
            "threads": _threads() - threads,
        }
        if not any(leaked.values()):
            return
        if time.monotonic() > end:
            pytest.fail(f"left after: {leaked}")
        time.sleep(0.02)
        gc.collect()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start servers: serve(engine=..., codec=..., max_queue=..., ...); fields of Limits by name."""
    with ExitStack() as stack:

        def start(engine: Maker = None, codec: Any = None, **options: Any) -> Served:
            names = set(Limits.__dataclass_fields__) & options.keys()
            limits = Limits(**{name: options.pop(name) for name in names})
            return stack.enter_context(serve_in(tmp_path, engine, codec, limits, options))

        yield start


@pytest.fixture(params=["ipc", "tcp"])
def transport(request: pytest.FixtureRequest) -> dict[str, str]:
    """Options of `serve`, by which a test runs once over each transport."""
    return {} if request.param == "ipc" else {"endpoint": "tcp://127.0.0.1:*"}


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ScriptedServer]:
    """A scripted server over ipc://, or over what OVER_EACH says."""
    over_tcp = getattr(request, "param", "ipc") == "tcp"
    with ScriptedServer("tcp://127.0.0.1:*" if over_tcp else ipc_url(tmp_path)) as running:
        yield running


OVER_EACH = pytest.mark.parametrize("server", ["ipc", "tcp"], indirect=True)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten heartbeats to a tenth, so that timeouts of seconds come soon."""
    monkeypatch.setattr(protocol, "HEARTBEAT_INTERVAL_S", protocol.HEARTBEAT_INTERVAL_S / 10)
    monkeypatch.setattr(protocol, "SILENCE_S", protocol.SILENCE_S / 10)
