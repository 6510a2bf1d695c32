"""This module runs a server of a FakeEngine in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raw_client import RawClient

from lowlat.ipc.wire import Bye

__all__ = ["await_fake", "fake_process", "hear_bye", "start_fake"]

SCRIPT = Path(__file__).with_name("fake_server.py")


def start_fake(folder: Path, stderr: Any = subprocess.DEVNULL, **options: Any) -> "subprocess.Popen[str]":
    """Start a server on `s.sock` in the folder; options are engine, limits and log of fake_server.py."""
    command = [sys.executable, str(SCRIPT), f"ipc://{folder}/s.sock", json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


def await_fake(process: "subprocess.Popen[str]") -> None:
    """Wait until it serves."""
    assert process.stdout is not None
    assert process.stdout.readline()


@contextmanager
def fake_process(folder: Path, stderr: Any = subprocess.DEVNULL, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run a server in a process of its own until it is ready; kill it at the end if it still runs."""
    with start_fake(folder, stderr, **options) as running:
        try:
            await_fake(running)
            yield running
        finally:
            running.kill()


def hear_bye(client: RawClient) -> Bye:
    """Assert that BYE comes last, after the ends of all requests."""
    bye = client.hear(Bye)
    assert client.is_quiet(0.05)
    return bye
