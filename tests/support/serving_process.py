"""`lowlat serve` in a process of its own, for tests: started, awaited, ended, its log kept."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Serving", "gateway_of", "serving", "serving_environment"]

START_S = 240.0  # on a GPU kernels may have to be compiled first, next to other tests that do
KEPT = ("LOWLAT_KERNEL_CACHE",)
END_S = 30.0


@dataclass
class Serving:
    """A server that is ready; `environment` leads clients to it."""

    process: "subprocess.Popen[str]"
    ready: dict[str, Any]
    environment: dict[str, str]
    log: Path

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return str(self.ready["endpoint"])


def serving_environment(folder: Path) -> dict[str, str]:
    """An environment whose default endpoint lies in this folder; of lowlat's own settings only the cache's stays."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("LOWLAT_") or name in KEPT}
    folder.chmod(0o700)
    return {**own, "XDG_RUNTIME_DIR": str(folder), "PYTHONWARNINGS": "default"}


@contextmanager
def serving(folder: Path, arguments: Sequence[object] = ()) -> Iterator[Serving]:
    """Run a server until the context ends; it must then end well, by SIGTERM, unless it has ended already."""
    environment = serving_environment(folder)
    log = folder / "serve.log"
    command = [sys.executable, "-P", "-m", "lowlat.cli", "serve", "--json", *map(str, arguments)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, cwd=folder, env=environment, text=True
        ) as process,
    ):
        try:
            ready = _await_ready(process, log)
            yield Serving(process, ready, {**environment, "LOWLAT_ENDPOINT": ready["endpoint"]}, log)
            if process.poll() is None:
                process.terminate()
                assert process.wait(END_S) == 0, log.read_text()
        finally:
            process.kill()


def _await_ready(process: "subprocess.Popen[str]", log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    while not select.select([process.stdout], [], [], 0.2)[0]:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
    line = process.stdout.readline()
    assert line, log.read_text()
    ready: dict[str, Any] = json.loads(line)
    assert ready["event"] == "ready"
    return ready


def gateway_of(server: int) -> int:
    """The process of a server's gateway."""
    children = Path(f"/proc/{server}/task").glob("*/children")
    for pid in (int(pid) for file in children for pid in file.read_text().split()):
        if b"--parent" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no gateway")
