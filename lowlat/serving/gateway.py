"""This module starts the HTTP gateway of `lowlat serve` as a separate process that ends with the server."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowlat.errors import ConfigError

__all__ = ["check_gateway", "http_gateway"]

NEEDED = ("starlette", "uvicorn", "prometheus_client")
START_S = 60.0
END_S = 5.0

logger = logging.getLogger("lowlat.serving")


def check_gateway(address: str, origins: str | None = None) -> None:
    """Check a gateway's address, origins and key before anything is loaded. Raises ConfigError."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise ConfigError(f"an HTTP gateway ({address}) needs {', '.join(lacking)}: pip install 'lowlat[http]'")
    from lowlat.serving.http.auth import key_of, origins_of
    from lowlat.serving.http.server import check_free, parse_address

    key_of(os.environ)
    origins_of(origins)
    check_free(parse_address(address))


@contextmanager
def http_gateway(
    address: str,
    endpoint: str,
    hosts: str | None,
    curve_keys: Path | None,
    *,
    origins: str | None = None,
    socket_mode: str = "600",
    roster: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a gateway while the context lasts; yields its facts: url, page, and the key if it made one.

    address   [HOST:]PORT or unix:PATH
    endpoint  the server's endpoint
    hosts     further names under which clients reach it, separated by commas
    origins   origins of other sites whose pages may use it, separated by commas
    socket_mode  mode of the file of unix:PATH, in octal digits
    roster    file that lists several models, which requests name
    Raises ConfigError if the gateway does not open.
    """
    reading, writing = os.pipe()  # this end closes with this process in any case, and the gateway notices it
    command = [sys.executable, "-P", "-m", "lowlat.cli", "http", address, "--json", f"--parent={reading}"]
    command.append(f"--endpoint={endpoint.replace('tcp://0.0.0.0:', 'tcp://127.0.0.1:')}")
    if hosts is not None:
        command.append(f"--http-host={hosts}")
    command.append(f"--http-socket-mode={socket_mode}")
    if origins is not None:
        command.append(f"--http-origins={origins}")
    if curve_keys is not None:
        command.append(f"--curve-keys={curve_keys}")
    if roster is not None:
        command.append(f"--roster={roster}")
    closing = threading.Event()
    try:
        # in a session of its own, it gets no Ctrl-C: the server gets it, and lets running requests finish first
        process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(reading,), start_new_session=True)
    except OSError as error:
        os.close(writing)
        raise ConfigError(f"the HTTP gateway could not be started: {error.strerror}") from error
    finally:
        os.close(reading)
    try:
        facts = _opened(process, address)
        threading.Thread(target=_watch, args=(process, closing), name="lowlat-gateway", daemon=True).start()
        yield facts
    finally:
        closing.set()
        os.close(writing)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _opened(process: "subprocess.Popen[bytes]", address: str) -> dict[str, Any]:
    """Read the line in which the gateway says that it is open. Raises ConfigError if it does not open."""
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        line = b"" if process.stdout is None else process.stdout.readline()
    finally:
        timer.cancel()
    try:
        facts: dict[str, Any] = json.loads(line)
    except ValueError:
        raise ConfigError(f"the HTTP gateway at {address} did not open; stderr says why") from None
    if "error" in facts:
        raise ConfigError(f"the HTTP gateway at {address} did not open: {facts['error']}")
    return facts


def _watch(process: "subprocess.Popen[bytes]", closing: threading.Event) -> None:
    code = process.wait()
    if not closing.is_set():
        logger.warning("the HTTP gateway ended with exit code %d; the server goes on", code)
