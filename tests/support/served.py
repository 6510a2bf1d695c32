"""This module runs a server in the tests' own process."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from raw_client import RawClient, raw_client

from lowlat.ipc.limits import Limits
from lowlat.ipc.server import Server

__all__ = ["Maker", "Serve", "Served", "eventually", "serve_in"]

Maker = FakeEngine | Callable[[], FakeEngine] | None


class Served:
    """A server in this process, its engine (unless the test made one), and the clients that are closed with it."""

    def __init__(self, server: Server, engine: FakeEngine, stack: ExitStack) -> None:
        self.server = server
        self.engine = engine
        self._stack = stack

    def client(self, **options: Any) -> RawClient:
        return self._stack.enter_context(raw_client(self.server.endpoint, **options))


Serve = Callable[..., Served]


@contextmanager
def serve_in(folder: Path, engine: Maker, codec: Any, limits: Limits, options: Any) -> Iterator[Served]:
    engine = FakeEngine(0.002) if engine is None else engine
    with ExitStack() as stack:
        server = Server(engine, codec, options.pop("endpoint", f"ipc://{folder}/s.sock"), limits, **options)
        try:
            stack.enter_context(server)
            yield Served(server, engine if isinstance(engine, FakeEngine) else FakeEngine(), stack)
        finally:
            if isinstance(engine, FakeEngine):
                engine.unhang.set()


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition, or fail."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it did not come to pass in time")
        time.sleep(0.002)
