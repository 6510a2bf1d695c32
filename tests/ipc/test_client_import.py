"""`import lowlat.ipc` is quick and loads nothing heavy, with a client in it and used."""

import json
import subprocess
import sys

CODE = """
import json, sys, time
begin = time.process_time()
{what}
seconds = time.process_time() - begin
print(json.dumps([seconds, sorted({{name.split(".")[0] for name in sys.modules}})]))
"""


def measure(what: str) -> tuple[float, set[str]]:
    """The least CPU seconds of three runs, the interpreter's own start excluded, and the modules loaded."""
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(what=what)], capture_output=True, text=True, check=True, timeout=60
        )
        runs.append(json.loads(done.stdout))
    return min(run[0] for run in runs), set(runs[0][1])


def test_import_is_quick_and_light() -> None:
    seconds, modules = measure("from lowlat.ipc import Client, Chunk, Busy; Client")
    assert not modules & {"torch", "numpy", "numba", "cuda", "transformers", "asyncio", "tokenizers"}
    assert seconds < 0.2


def test_asyncio_is_for_those_who_want_it() -> None:
    seconds, modules = measure("from lowlat.ipc import AsyncClient")
    assert "asyncio" in modules
    assert not modules & {"torch", "numpy", "numba"}
    assert seconds < 0.4
