"""A server that a benchmark runs in a process of its own: the same program, told to serve."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lowlat.errors import ConfigError

__all__ = ["server_process"]

READY_S = 600.0


@contextmanager
def server_process(module: str, arguments: Sequence[str]) -> Iterator[None]:
    """Run `python -m module` until the block ends, from the line on that it prints when it is ready.

    Raises ConfigError where it ends before that.
    """
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as server:
        try:
            if server.stdout is None or not server.stdout.readline():
                raise ConfigError(f"the server ended before it was ready: exit code {server.wait(READY_S)}")
            yield
        finally:
            server.terminate()
