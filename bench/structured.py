"""A decode step with a grammar and without, by the host's clock between outputs of a runtime or messages of a server.

    python -m bench.structured --out bench/results/h200/structured.json
    python -m bench.structured --geometry tiny --context 40 --steps 40 --batch 1 --device cpu --out structured.json

The subjects are Llama-3.1-8B's shape, with random weights and imposed acceptance, and the bundled pair with its own;
passes without a grammar, with one for every request, and with one for all but the first take turns. The grammar is a
stand-in whose time is imposed: it copies masks that forbid one token in a hundred and takes as long for each row as a
library was measured to for a nested JSON schema (`ROW_US`). Of a server, which is another process, the steps are those
of the first request's messages. With each subject's own acceptance, text of which `FORCED` of `PERIOD` tokens are
forced is decoded with forced tokens offered as drafts and without.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.clock import percentile
from bench.conditions import stamps_of, write_json
from bench.ready_process import ready_process
from bench.subjects import open_subject
from bench.tails_run import steps_of
from lowlat.cli.serving import SWITCH_INTERVAL_S
from lowlat.engine.runtime import Runtime
from lowlat.ipc import AsyncClient
from lowlat.ipc.server import Server
from lowlat.ipc.wire import Sampling
from lowlat.options.request import SamplingParams
from lowlat.serving.engine import RuntimeEngine
from lowlat.tools.bench.subject import Subject

__all__ = ["StandIn", "main", "measure"]

# us that a row's mask takes, by share of rows: medians, 90th and 99th percentiles of a library on a nested JSON schema
ROW_US = ((0.89, 7.0), (0.09, 50.0), (0.02, 60.0))
POOL = 64  # masks
ALLOWED = 0.99  # of the tokens
PERIOD, FORCED = 16, 12
ROOM = 64  # tokens that a slot may be behind another when its steps are timed
GUIDED = 1  # seed of a request that a server gives a stand-in: greedy ones need none
ACCEPT_LENGTH = 3.0  # tokens a step where it is imposed


class StandIn:
    """A grammar that allows most tokens, or forces runs of them; see `GrammarState`.

    forced  tokens that follow each other, then as many free ones as fill PERIOD; none: all are free
    offers  whether forced tokens are offered as drafts
    """

    def __init__(self, vocab_size: int, forced: Sequence[int] = (), *, offers: bool = False) -> None:
        source = np.random.default_rng(0)
        words = -(-vocab_size // 32)
        bits = source.random((POOL, words * 32)) < ALLOWED
        self._pool = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._times = source.choice([us for _, us in ROW_US], POOL, p=[share for share, _ in ROW_US]) * 1e-6
        self._forced, self._offers, self._place = tuple(forced), offers, 0

    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """Copy a mask for each row, and spend the imposed time."""
        places: list[int] = []
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            end = time.perf_counter() + self._times[token % POOL]
            places.append(self._place if row == 0 else places[parent] + 1)
            place = places[row] % PERIOD
            if place < len(self._forced):
                masks[row] = 0
                masks[row].view(np.uint32)[self._forced[place] >> 5] = 1 << (self._forced[place] & 31)
            else:
                masks[row] = self._pool[token % POOL]
            while time.perf_counter() < end:
                pass

    def advance(self, tokens: Sequence[int]) -> None:
        """Count the tokens; imposed acceptance takes forbidden ones, too."""
        self._place += len(tokens)

    @property
    def active(self) -> bool:
        """Always true."""
        return True

    @property
    def terminated(self) -> bool:
        """Always false."""
        return False

    def forced(self, limit: int) -> list[int]:
        """The rest of a run of forced tokens, where they are offered."""
        place = self._place % PERIOD
        return list(self._forced[place : place + limit]) if self._offers else []


class _Way(Protocol):
    """A way to decode requests of one batch together."""

    def run(self, grammars: Sequence[StandIn | None]) -> Iterator[tuple[float, float]]:
        """us and tokens a request of each step that all requests took part in and none ended."""
        ...


class _Passes:
    """Requests of one batch, decoded together by a runtime in this process."""

    def __init__(self, runtime: Runtime, prompts: list[list[int]], depth: int, window: int) -> None:
        self.runtime, self._prompts, self._window = runtime, prompts, window
        runtime.speculate(depth)

    def run(self, grammars: Sequence[StandIn | None]) -> Iterator[tuple[float, float]]:
        """See `_Way`."""
        runtime = self.runtime
        params = SamplingParams(max_tokens=self._window, ignore_eos=True, temperature=0.0)
        for prompt, grammar in zip(self._prompts, grammars, strict=True):
            name = runtime.submit(prompt, params)
            if grammar is not None:
                runtime._requests[name].grammar = grammar
        while runtime.busy:
            start = time.perf_counter()
            outputs = runtime.step()
            taken = (time.perf_counter() - start) * 1e6
            whole = len(outputs) == len(self._prompts) and not any(output.finish_reason for output in outputs)
            if whole and len({output.request_id for output in outputs}) == len(outputs):
                yield taken, sum(len(output.token_ids) for output in outputs) / len(outputs)


class _Streams:
    """Requests of one batch, decoded together by a server in another process, as the first one's client sees them."""

    def __init__(self, endpoint: str, prompts: list[list[int]], window: int) -> None:
        self._endpoint, self._prompts, self._window = endpoint, prompts, window

    def run(self, grammars: Sequence[StandIn | None]) -> Iterator[tuple[float, float]]:
        """See `_Way`; a message of several steps is one of their mean."""
        yield from asyncio.run(self._decode([GUIDED if grammar else 0 for grammar in grammars]))

    async def _decode(self, seeds: Sequence[int]) -> list[tuple[float, float]]:
        begun, ended, found = set[int](), set[int](), list[tuple[float, float]]()
        params: dict[str, Any] = {"max_tokens": self._window, "ignore_eos": True, "temperature": 0.0}

        async def read(number: int) -> None:
            prompt, seed, before = self._prompts[number], seeds[number], time.perf_counter()
            async for chunk in client.generate(prompt, seed=seed, **params):
                now, count = time.perf_counter(), len(chunk.token_ids)
                if number == 0 and count and len(begun) == len(seeds) and not ended:
                    steps = steps_of(chunk.token_ids, sum(chunk.accepted))
                    found.append(((now - before) * 1e6 / steps, count / steps))
                before = now
                if count:
                    begun.add(number)
            ended.add(number)

        async with AsyncClient(self._endpoint) as client:
            await asyncio.gather(*(read(number) for number in range(len(seeds))))
        return found[:-1]


class _GuidedEngine(RuntimeEngine):
    """An engine that gives requests of one seed a stand-in for a grammar."""

    def submit(self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "") -> None:
        """Take a request. Raises as `RuntimeEngine.submit`."""
        super().submit(request_id, prompt, sampling, cache_salt)
        if sampling.seed == GUIDED:
            self._runtime._requests[request_id].grammar = StandIn(self._runtime.model_config.vocab_size)


def measure(way: _Way, vocab_size: int, batch: int, *, steps: int) -> dict[str, Any]:
    """The times of steps of one batch, plain, under grammars, and under all but the first one's, in turns; us."""
    times: dict[str, list[float]] = {"plain": [], "grammar": [], **({"beside": []} if batch > 1 else {})}
    tokens = dict.fromkeys(times, 0.0)
    while min(map(len, times.values())) < steps:
        for kind in times:
            free = {"plain": batch, "grammar": 0, "beside": 1}[kind]
            guided = [StandIn(vocab_size) if number >= free else None for number in range(batch)]
            found = list(way.run(guided))[2:]
            times[kind] += [taken for taken, _ in found]
            tokens[kind] += sum(count for _, count in found)
    row: dict[str, Any] = {}
    for kind, values in times.items():
        p50, p99 = percentile(values, 50), percentile(values, 99)
        own = {"p50_us": round(p50, 1), "p99_us": round(p99, 1), "steps": len(values)}
        row[kind] = own | {"tokens_per_step": round(tokens[kind] / len(values), 3)}
    for name in ("p50_us", "p99_us"):
        row[f"{name[:3]}_over_plain"] = round(row["grammar"][name] / row["plain"][name], 4)
    return row


def _in_process(runtime: Runtime, prompts: list[list[int]], depth: int, *, steps: int, window: int) -> dict[str, Any]:
    """`measure` by `Runtime.step`, and what masks took."""
    filled = _figures(runtime)
    way = _Passes(runtime, prompts, depth, window)
    row = measure(way, runtime.model_config.vocab_size, len(prompts), steps=steps)
    since = {name: value - filled[name] for name, value in _figures(runtime).items()}
    row["mask_us"] = round(since["mask_s"] * 1e6 / since["num_mask_steps"], 1)
    row["rows_wait_us"] = round(since["rows_wait_s"] * 1e6 / since["num_mask_steps"], 1)
    return row


def _figures(runtime: Runtime) -> dict[str, float]:
    names = ("mask_s", "rows_wait_s", "num_mask_steps")
    found = runtime.summary().get("structured_output", {})
    return {name: found.get(name, 0) for name in names}


def measure_forced(runtime: Runtime, prompt: list[int], depth: int, *, steps: int, window: int) -> dict[str, Any]:
    """Tokens a second of text that is mostly forced, with forced tokens offered as drafts and without."""
    passes = _Passes(runtime, [prompt], depth, window)
    vocab_size = runtime.model_config.vocab_size
    run = np.random.default_rng(1).integers(0, vocab_size, FORCED).tolist()
    figures = {}
    for name, offers in (("without", False), ("with", True)):
        taken, tokens, count = 0.0, 0.0, 0
        while count < steps:
            found = list(passes.run([StandIn(vocab_size, run, offers=offers)]))[2:]
            taken, tokens = taken + sum(us for us, _ in found), tokens + sum(number for _, number in found)
            count += len(found)
        figures[name] = {"tokens_per_s": round(tokens / taken * 1e6, 1), "tokens_per_step": round(tokens / count, 3)}
    ratio = figures["with"]["tokens_per_s"] / figures["without"]["tokens_per_s"]
    return {"num_speculative_tokens": depth, "forced_share": FORCED / PERIOD, **figures, "ratio": round(ratio, 3)}


def _rows(subject: Subject, place: int, options: argparse.Namespace, given: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a subject, in the process and through a socket.

    place  of the subject among those that `given`, the command line, asks for: a server makes it anew from both
    """
    prompts = subject.prompts.some([options.context] * max(options.batch))
    for depth, through in itertools.product(options.depth, options.through):
        opened = _load(subject, depth, options) if through == "process" else _server(place, depth, given)
        with opened as source:
            for batch in options.batch:
                if isinstance(source, Runtime):
                    found = _in_process(source, prompts[:batch], depth, steps=options.steps, window=options.window)
                else:
                    way = _Streams(source, prompts[:batch], options.window)
                    found = measure(way, subject.config.vocab_size, batch, steps=options.steps)
                row = {"through": through, "num_speculative_tokens": depth, "batch": batch, **found}
                print(subject.name, row, flush=True)
                yield row


def _forced(subject: Subject, options: argparse.Namespace) -> list[dict[str, Any]]:
    """`measure_forced` at every depth."""
    found = []
    (prompt,) = subject.prompts.some([options.context])
    for depth in filter(None, options.depth):
        with _load(subject, depth, options) as runtime:
            found.append(measure_forced(runtime, prompt, depth, steps=options.steps, window=options.window))
            print(subject.name, found[-1], flush=True)
    return found


def _load(subject: Subject, depth: int, options: argparse.Namespace) -> Runtime:
    context = options.context + options.window + ROOM
    return subject.load(depth, max_batch=max(options.batch), max_context=context)


@contextmanager
def _server(place: int, depth: int, given: Sequence[str]) -> Iterator[str]:
    """The endpoint of a server of a subject, which is this program in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="lowlat-structured-") as folder:
        endpoint = f"ipc://{folder}/s.sock"
        root = Path(__file__).parents[1]
        with ready_process("-m", "bench.structured", *given, "--serve", endpoint, place, depth, cwd=root):
            yield endpoint


def _serve(subject: Subject, depth: int, endpoint: str, options: argparse.Namespace) -> int:
    """Serve until SIGTERM, with turns of threads as `lowlat serve` has them."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = Server(lambda: _GuidedEngine(_load(subject, depth, options)), None, endpoint)
    server.start()
    print(endpoint, flush=True)
    return server.run()


def _subject(options: argparse.Namespace, geometry: str | None, *, imposed: bool) -> AbstractContextManager[Subject]:
    """The subject of a geometry, with imposed acceptance or its draft model's own, or the bundled pair."""
    length = ACCEPT_LENGTH if imposed else None
    return open_subject({"device": options.device}, geometry=geometry, accept_length=length)


def _options(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--geometry", default="llama-8b", help="of the subject with random weights; none: left out")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--window", type=int, default=256, help="tokens that a request decodes")
    parser.add_argument("--steps", type=int, default=2000, help="that are timed of each kind, at least")
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 3], help="S")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--through", nargs="+", choices=("process", "socket"), default=["process", "socket"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="where there is no git checkout to ask")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)  # by a row through a socket: endpoint, subject, S
    return parser.parse_args(given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every subject, print its rows, and write the file after each."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    if options.device == "cpu":
        torch.set_num_threads(1)
    geometries = [None] if options.geometry == "none" else [options.geometry, None]
    if options.serve is not None:
        endpoint, place, depth = options.serve
        geometry = geometries[int(place)]
        with _subject(options, geometry, imposed=geometry is not None) as subject:
            return _serve(subject, int(depth), endpoint, options)
    settings = {name: getattr(options, name) for name in ("context", "window", "steps")}
    settings |= {"row_us": ROW_US, "allowed": ALLOWED}
    result = {**stamps_of(torch.device(options.device), options.commit), "settings": settings}
    subjects: list[dict[str, Any]] = []
    for place, geometry in enumerate(geometries):
        imposed = geometry is not None
        with _subject(options, geometry, imposed=imposed) as subject:
            found: dict[str, Any] = {"subject": subject.name, "imposed_acceptance": imposed, "rows": [], "forced": []}
            subjects.append(found)
            for row in _rows(subject, place, options, given):
                found["rows"].append(row)
                write_json(options.out, {**result, "subjects": subjects})
        with _subject(options, geometry, imposed=False) as subject:
            found["forced"] = _forced(subject, options)
        write_json(options.out, {**result, "subjects": subjects})
    return 0


if __name__ == "__main__":
    sys.exit(main())
