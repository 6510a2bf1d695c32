"""Tails of a step's time and the host's share of it, in the process and through a socket, the host idle and busy.

    python -m bench.tails --out bench/results/h200/tails.json --limit-s 60
    python -m bench.tails --geometry tiny --context 40 --window 60 --steps 100 --device cpu --out tails.json

A request is alone. All requests have the same prompt of --context tokens, of which all but the last chunk is read once,
and decode --window tokens behind it; the steps of one request after the other are timed until there are --steps of
them, or --limit-s seconds are over. The first token and the three arrivals behind it are not timed. A case is who
drives the steps (--through), whether the device repeats them by itself (--loops), and what else the host does (--host);
`bench.tails_result` says what its row holds. The device's own time of a step is measured in the same load of the model,
over the same positions, by events around steps that are queued one behind the other. Rows are written as they are made:
an interrupted run goes on where it was, and measures again the cases that a shorter limit has cut short.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from bench.ready_process import ready_process
from bench.tails_result import Case, Setup, Tails, TailsFile
from bench.tails_run import Steps, busy_host, max_context, measure, own_times, steps_in_process, steps_through_socket
from lowlat.cli.serving import SWITCH_INTERVAL_S
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.executors.devices import leave_a_core
from lowlat.ipc import Client
from lowlat.ipc.server import Server
from lowlat.serving.engine import RuntimeEngine
from lowlat.tools.bench.geometry import read_geometries
from lowlat.tools.bench.results import read_struct, write_struct
from lowlat.tools.bench.subject import Subject, open_model, open_random
from lowlat.tools.draft_model.random_models import DRAFT_MODELS

__all__ = ["cases_of", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case that the file lacks, print its row, and write the file."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    leave_a_core()
    with tempfile.TemporaryDirectory(prefix="lowlat-tails-") as scratch:
        bench = _Bench(_subject(options, Path(scratch)), options, given, Path(scratch))
        if options.serve is not None:
            return bench.serve(options.serve)
        if options.out is None:
            raise ConfigError("nowhere to write (--out FILE)")
        file = _begin(options, bench.subject)
        for row in bench.rows([case for case in bench.cases() if not _is_done(file.row(case), options)]):
            file.add(row)
            write_struct(options.out, file)
            names = ("num_steps", "p50_us", "p99_us", "p999_over_p50", "mean_us")
            print(json.dumps({"case": row.case.name, **{name: getattr(row, name) for name in names}}), flush=True)
    shares = {row.case.name: row.host_share for row in file.rows if row.host_share is not None}
    print(json.dumps({"out": str(options.out), "cases": len(file.rows), "host_share": shares}))
    return 0


def cases_of(through: Sequence[str], loops: Sequence[bool], hosts: Sequence[str]) -> list[Case]:
    """Every case, those of one load next to each other; the device's own time is the last of its load."""
    found = []
    for way in through:
        for device_loop in loops:
            for host in hosts:
                if way != "socket" or host != "threads":  # the threads that matter are the server's
                    found.append(Case(through=way, device_loop=device_loop, host=host))  # type: ignore[arg-type]
            if way == "process":
                found.append(Case(through="device", device_loop=device_loop, host="idle"))
    return found


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="llama-8b", help="a shape of geometries.toml, with random weights")
    parser.add_argument("--model", type=Path, default=None, help="a directory, in place of a geometry")
    parser.add_argument("--draft-model", type=Path, default=None)
    parser.add_argument("--method", choices=list(DRAFT_MODELS), default="eagle3", help="of the draft model")
    parser.add_argument("-S", "--num-speculative-tokens", type=int, default=0, dest="depth")
    parser.add_argument("--simulated-accept-length", type=float, default=None)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--window", type=int, default=2048, help="tokens that a request decodes")
    parser.add_argument("--steps", type=int, default=100_000, help="of each case")
    parser.add_argument("--limit-s", type=float, default=None, help="seconds of each case, its load not counted")
    parser.add_argument("--through", nargs="+", choices=("process", "socket"), default=["process", "socket"])
    parser.add_argument("--loops", choices=("on", "off", "both"), default="both", help="loops on the device")
    parser.add_argument("--host", nargs="+", choices=("idle", "busy", "threads"), default=["idle", "busy"])
    parser.add_argument("--spinners", type=int, default=len(os.sched_getaffinity(0)), help="processes that spin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--fresh", action="store_true", help="begin anew where there are rows already")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--serve", metavar="ENDPOINT", default=None, help=argparse.SUPPRESS)  # by a case of a socket
    options = parser.parse_args(arguments)
    if min(options.context, options.steps, options.spinners) < 1 or options.window < 8:
        parser.error("--context, --steps and --spinners want at least 1, --window 8")
    return options


def _subject(options: argparse.Namespace, scratch: Path) -> Subject:
    """The model. Raises ConfigError."""
    running = {"device": options.device}
    if not options.depth:
        speculation = None
    else:
        imposed = {"simulated_accept_length": options.simulated_accept_length}
        speculation = {"method": options.method, "model": options.draft_model, **imposed}
    if options.model is not None:
        return open_model(options.model, speculation, running, prompts=None)
    geometries = read_geometries()
    if options.geometry not in geometries:
        raise ConfigError(f"unknown geometry {options.geometry!r}; known: {', '.join(geometries)}")
    geometry = geometries[options.geometry]
    return open_random(options.geometry, geometry, speculation, running, scratch=scratch, drafts=options.depth > 0)


def _begin(options: argparse.Namespace, subject: Subject) -> TailsFile:
    """The file, with the rows that it has already. Raises ConfigError where they are of other conditions."""
    setup = Setup(
        context=options.context,
        window=options.window,
        num_speculative_tokens=options.depth,
        simulated_accept_length=options.simulated_accept_length,
        steps=options.steps,
        spinners=options.spinners,
    )
    file = TailsFile(setup=setup, environment=subject.environment(options.commit))
    if options.out.exists() and not options.fresh:
        old = read_struct(options.out, TailsFile)
        differences = old.environment.differences(file.environment)
        if old.setup != setup or differences:
            words = "; ".join([*differences, *([f"{old.setup}, {setup}"] if old.setup != setup else [])])
            raise ConfigError(f"{options.out} holds rows of other conditions ({words}): --fresh begins anew")
        file.rows = old.rows
    return file


def _is_done(row: Tails | None, options: argparse.Namespace) -> bool:
    if row is None:
        return False
    if row.case.through == "device" or row.num_steps >= options.steps or row.limit_s is None:
        return True
    return options.limit_s is not None and row.limit_s >= options.limit_s


class _Bench:
    """A subject's cases; `given` is the command line, from which a server in another process is made."""

    def __init__(self, subject: Subject, options: argparse.Namespace, given: Sequence[str], scratch: Path) -> None:
        self.subject, self._options, self._given, self._scratch = subject, options, given, scratch
        self._prompt = subject.prompts.some([options.context])[0]

    def cases(self) -> list[Case]:
        """All that are asked for; without a graph executor the device repeats nothing."""
        options = self._options
        loops = {"on": [True], "off": [False], "both": [False, True]}[options.loops]
        if options.loops == "both" and self.subject.choice().executor != "graph":
            loops = [False]
        return cases_of(options.through, loops, options.host)

    def rows(self, cases: Sequence[Case]) -> Iterator[Tails]:
        """The rows of cases, as they are measured; neighbours of one way and one load share it."""
        for (by_socket, device_loop), group in groupby(
            cases, lambda case: (case.through == "socket", case.device_loop)
        ):
            yield from (self._by_socket if by_socket else self._in_process)(list(group), device_loop)

    def _load(self, device_loop: bool) -> Runtime:
        options = self._options
        size = max_context(options.context, options.window)
        return self.subject.load(options.depth, max_batch=1, max_context=size, device_loop=device_loop)

    def _in_process(self, cases: Sequence[Case], device_loop: bool) -> Iterator[Tails]:
        """The cases of one load in this process."""
        window = self._options.window
        with self._load(device_loop) as runtime:
            for case in cases:
                if case.through == "device":
                    yield own_times(case, runtime, self._prompt, window)
                else:
                    yield self._measure(case, lambda: steps_in_process(runtime, self._prompt, window))

    def _by_socket(self, cases: Sequence[Case], device_loop: bool) -> Iterator[Tails]:
        """The cases of one server, which is this program in a process of its own."""
        window = self._options.window
        with self._server(device_loop) as endpoint, Client(endpoint) as client:
            for case in cases:
                yield self._measure(case, lambda: steps_through_socket(client, self._prompt, window))

    def _measure(self, case: Case, request: Callable[[], Steps]) -> Tails:
        with busy_host(case, self._options.spinners):
            return measure(case, request, self._options.steps, self._options.limit_s)

    @contextmanager
    def _server(self, device_loop: bool) -> Iterator[str]:
        endpoint = f"ipc://{self._scratch}/{'loops' if device_loop else 'steps'}.sock"
        command = ("-m", "bench.tails", *self._given, "--serve", endpoint, "--loops", "on" if device_loop else "off")
        with ready_process(*command, cwd=Path(__file__).parents[1]):
            yield endpoint

    def serve(self, endpoint: str) -> int:
        """Serve the subject until SIGTERM, with turns of threads as `lowlat serve` has them."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        server = Server(lambda: RuntimeEngine(self._load(self._options.loops == "on")), None, endpoint)
        server.start()
        print(endpoint, flush=True)
        return server.run()


if __name__ == "__main__":
    raise SystemExit(main())
