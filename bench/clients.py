"""This program runs other projects' clients against `lowlat serve --http`, and reports which cases work.

    python -m bench.clients --python langchain-openai=VENV/bin/python --out bench/results/cpu/clients.json

A Python with the client installed runs it: that of `--python CLIENT=PYTHON` (without a client: for all of them), or
this one. Clients that it lacks are reported as missing, and keep their rows in the file of --out. Without --model the
chat model is the one of `lowlat chat --demo`. `--record DIR` adds a proxy that writes the requests of each client to a
file, for the tests that replay them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.client_recorder import Recorder, recorded
from bench.lib.conditions import stamps_of, write_json
from bench.ready_process import ready_process
from lowlat.cli.commands.demo import chat_model

__all__ = ["CLIENTS", "main", "table"]

ROOT = Path(__file__).parents[1]
NAME = "smollm2"
CLIENTS = {  # by the distribution that has it, the module that makes it work
    "openai": "with_openai",
    "langchain-openai": "with_langchain_openai",
    "instructor": "with_instructor",
    "pydantic-ai-slim": "with_pydantic_ai",
    "openai-agents": "with_openai_agents",
    "llm": "with_llm",
    "lm-eval": "with_lm_eval",
    "guidellm": "with_guidellm",
}
CLIENT_S = 1800.0


def run_client(client: str, python: str, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of a client's cases; none where this Python lacks it. Raises RuntimeError where it ends early."""
    asked = f"import importlib.metadata as m; m.version({client!r})"
    if subprocess.run([python, "-c", asked], capture_output=True, check=False).returncode:
        return []
    done = subprocess.run(
        [python, "-m", f"bench.client_calls.{CLIENTS[client]}"],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{client}: its cases ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]


@contextmanager
def served(model: Path) -> Iterator[dict[str, str]]:
    """A server and a gateway in a process of their own: `url` and `key`."""
    with tempfile.TemporaryDirectory(prefix="lowlat-") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        command = ("-P", "-m", "lowlat.cli", "serve", "--json", "--model", model, "--name", NAME, "--http", "0")
        with ready_process(*command, env=environment) as server:
            yield json.loads(server.line)["http"]


def measure(
    model: Path, pythons: Mapping[str, str], clients: Sequence[str], case: str, recorder: Recorder | None
) -> list[dict[str, Any]]:
    """The rows of these clients against one server."""
    rows = []
    with ExitStack() as stack:
        http = stack.enter_context(served(model))
        url = http["url"]
        if recorder is not None:
            url = stack.enter_context(recorded(recorder, http["url"])) + "/{case}"
        environment = {
            "LOWLAT_CLIENTS_URL": f"{url}/v1",
            "LOWLAT_API_KEY": http["key"],
            "LOWLAT_CLIENTS_MODEL": NAME,
            "LOWLAT_CLIENTS_TOKENIZER": str(model),
            "LOWLAT_CLIENTS_CASE": case,
        }
        for client in clients:
            found = run_client(client, pythons.get(client, pythons.get("", sys.executable)), environment)
            for row in found:
                print("ok  " if row["ok"] else "FAIL", client, row["tried"], row["why"], file=sys.stderr, flush=True)
            if not found:
                print(f"{client} is not installed here", file=sys.stderr)
            elif recorder is not None:
                recorder.write(found)
            rows += found
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row of Markdown a client: its version, what worked, what did not and why."""
    lines = ["| client | version | works |", "|---|---|---|"]
    for client in dict.fromkeys(row["client"] for row in rows):
        own = [row for row in rows if row["client"] == client]
        works: dict[str, list[str]] = {}
        for row in own:
            if row["ok"]:
                kind, _, rest = str(row["tried"]).partition(", ")
                works.setdefault(kind, []).extend([rest.replace(", ", " + ")] if rest else [])
        cells = [f"{kind} ({', '.join(rest)})" if rest else kind for kind, rest in works.items()]
        cells += [f"**not** {row['tried']}: {row['why']}".replace("|", "\\|") for row in own if not row["ok"]]
        lines.append(f"| {client} | {own[0]['version']} | {'; '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the clients, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory; the demo's chat model by default")
    parser.add_argument("--python", action="append", default=[], metavar="[CLIENT=]PYTHON")
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS), metavar="CLIENT")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--record", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pythons = {name: python for name, _, python in (given.rpartition("=") for given in options.python)}
    model = options.model or chat_model(None)
    recorder = None if options.record is None else Recorder(options.record)
    stamps = stamps_of(torch.device("cpu"))
    rows = measure(model, pythons, options.only, options.case, recorder)
    if options.out is not None:
        if options.out.is_file():
            new = {row["client"] for row in rows}
            before = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
            rows += [row for row in before if row["client"] not in new]
            rows.sort(key=lambda row: list(CLIENTS).index(row["client"]))
        write_json(options.out, {**stamps, "model": model.name, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
