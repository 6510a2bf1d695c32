"""This module runs a benchmark's further processes, which print a line when they are ready."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["Ready", "ready_process"]

READY_S = 600.0


class Ready(NamedTuple):
    """The line that a process printed, and its id."""

    line: str
    pid: int


@contextmanager
def ready_process(*command: object, **options: Any) -> Iterator[Ready]:
    """Run Python with a command line until the block ends, once it has printed the line that says that it is ready.

    options  of subprocess.Popen: stderr, env, cwd
    Raises RuntimeError where it ends before that.
    """
    asked = [sys.executable, *map(str, command)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{' '.join(asked[1:3]):.80} ended before it was ready: {process.wait(READY_S)}")
            yield Ready(line, process.pid)
        finally:
            process.terminate()
