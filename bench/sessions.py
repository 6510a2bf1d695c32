"""This program measures sessions: restored prefixes, steps beside copies, an agent's turns with other load.

    python -m bench.sessions --geometry llama-8b --parts host steps --out bench/results/h200/sessions.json
    python -m bench.sessions --geometry llama-8b --parts agents disk --append --out bench/results/h200/sessions.json
    python -m bench.sessions --model DIR --device cpu --tokens 400 --host-gib 0.2 --out /tmp/sessions.json

Parts, in this order; the file is written after each row, and no part is begun after --limit-s:

host    a prompt of --tokens that is read whole; that is found on the device; and that is brought from host memory.
        `restore_s` is the time to the first token beyond that of the prompt on the device. `copy_s` is what its bytes
        take over the bus, by copies of 1 GiB of pinned memory, measured here
steps   the time between two tokens of a request that decodes, see `bench.steps_beside`: next to plain copies, to the
        tiers' copies, and to such that are throttled (cache_copy_gb_per_s), for each number of copies in a call of the
        driver that --calls gives; each beside the time alone, in turns
agents  turns of one agent while other prompts fill the device: with a session, and without
disk    the same as host, from files. `disk_s` is what their bytes take, read by as many threads into the same memory,
        by the fastest of three times; before each the files leave the page cache
A geometry's weights are random.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.lib.clock import percentile
from bench.lib.conditions import bench_parser, release, stamps_of, write_json
from bench.lib.subjects import known_geometry
from bench.steps_beside import BUS_BYTES, Copies, PlainCopies, StepsBeside, TierCopies
from lowlat import Runtime, SamplingParams
from lowlat.executors.bus_copies import CALL_MOVES
from lowlat.sequence.tiers.tiers import NUM_READERS, CacheTiers
from lowlat.tools.bench.geometry import random_target

__all__ = ["main"]

PARTS = ("host", "steps", "agents", "disk")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts and write the file; returns 1 where tokens differ."""
    options = _options(arguments)
    device = torch.device("cuda:0" if options.device == "auto" else options.device)
    bench = _Bench(options, device)
    for part in options.parts:
        if time.monotonic() - bench.begun > options.limit_s:
            print(f"{part} and what follows was left out: --limit-s {options.limit_s:g} have passed")
            break
        getattr(bench, part)()
        release(device)
    return int(not all(row.get("same_tokens", True) for row in bench.rows))


class _Bench:
    """The rows of one file."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._folder = TemporaryDirectory()
        self._source = torch.Generator().manual_seed(4)
        self.rows: list[dict[str, Any]] = json.loads(options.out.read_text())["rows"] if options.append else []
        self.begun = time.monotonic()

    def host(self) -> None:
        """A prompt that comes back from host memory."""
        options = self._options
        with self._load(max_batch=1, max_context=options.tokens + 256, host_cache_gib=options.host_gib) as runtime:
            tiers, prompt = _tiers(runtime), self._text(options.tokens)
            _ask(runtime, self._text(300), 4)  # the first launch of a program loads it
            cold_s, cold = _ask(runtime, prompt, 8)
            tiers.flush()
            _ask(runtime, prompt, 8)
            device_s, _ = _ask(runtime, prompt, 8)
            for again in range(3):
                runtime.kvcache.forget_all()
                before = tiers.stats()
                host_s, tokens = _ask(runtime, prompt, 8)
                num_bytes = tiers.stats()["bytes_in"] - before["bytes_in"]
                rate = _bus_bytes_per_s(self._device)
                self._add({
                    "part": "host", "again": again, "prompt_tokens": len(prompt), "bytes": num_bytes,
                    "read_s": cold_s, "device_first_token_ms": 1e3 * device_s, "host_first_token_ms": 1e3 * host_s,
                    "restore_s": host_s - device_s, "bus_gb_per_s": rate / 1e9, "copy_s": num_bytes / rate,
                    "over_copy": (host_s - device_s) * rate / max(1, num_bytes), "same_tokens": tokens == cold,
                })  # fmt: skip

    def steps(self) -> None:
        """Steps of one request, next to copies and alone, in turns."""
        options = self._options
        half, room = options.tokens // 2, min(options.tokens // 2, 1024) + 8 * options.steps
        # blocks for what decodes, and for one of the two prompts that are brought in turns
        blocks = -(-(half + room + 256) // 32)
        sizes: dict[str, Any] = {"max_context": max(half, room) + 256, "kv_blocks": blocks}
        with self._load(max_batch=2, host_cache_gib=options.host_gib, **sizes) as runtime:
            tiers, prompts = _tiers(runtime), [self._text(half) for _ in range(2)]
            for prompt in prompts:
                _ask(runtime, prompt, 1)
                tiers.flush()
            text = self._text(min(half, 1024))
            kinds: list[tuple[str, float | None, int]] = []
            for calls in options.calls:
                kinds += [("copies", None, calls), ("throttled copies", options.throttle * 1e9, calls)]
            if self._device.type == "cuda":
                plain = PlainCopies(self._device)
                self._add_steps("plain copies", runtime, text, plain, {})
                del plain
            for name, rate, calls in kinds:
                tiers.max_bytes_per_s = rate
                runtime.executor.movers[0].bus.call_moves = calls
                copies = TierCopies(runtime, tiers, prompts)
                self._add_steps(name, runtime, text, copies, {"throttle": rate and rate / 1e9, "call_moves": calls})

    def _add_steps(self, name: str, runtime: Runtime, text: list[int], copies: Copies, facts: dict[str, Any]) -> None:
        """Measure the steps of a request of its own next to copies."""
        options = self._options
        request = runtime.submit(text, _sampled(max_tokens=8 * options.steps))
        while not _decodes(runtime):
            runtime.step()
        measured = StepsBeside(runtime, copies)
        measured.run(options.steps, options.seconds)
        if _decodes(runtime):
            runtime.cancel(request)
        while runtime.busy:
            runtime.step()
        self._add({"part": "steps", "name": name, **measured.row(), **facts})

    def agents(self) -> None:
        """An agent's turns; between them others fill the device."""
        options = self._options
        system, tool, answer = options.system, options.tool, options.answer
        longest = system + options.turns * (tool + answer) + answer
        sizes = {"max_context": longest + 256, "kv_blocks": 2 * (-(-(longest + 256) // 32))}
        said = []
        for name in ("session", "none", "no tiers"):
            gib = 0.0 if name == "no tiers" else options.host_gib
            with self._load(max_batch=2, host_cache_gib=gib, **sizes) as runtime:
                _ask(runtime, self._text(300), 4)
                source = torch.Generator().manual_seed(7)
                prompt, turns, tokens = self._text(system, source), [], list[list[int]]()
                for turn in range(options.turns):
                    prompt += self._text(tool, source)
                    before = _hits(runtime)
                    session = "agent" if name == "session" else None
                    first_s, got = _ask(runtime, prompt, answer, seed=turn, session=session)
                    hits = {key: value - before[key] for key, value in _hits(runtime).items()}
                    turns.append({
                        "prompt_tokens": len(prompt), "tokens_read": len(prompt) - hits["tokens"],
                        "from_host_bytes": hits["bytes_in"], "first_token_ms": 1e3 * first_s,
                    })  # fmt: skip
                    tokens.append(got)
                    prompt += got
                    for _ in range(options.others):
                        runtime.submit(self._text(longest // 3), _sampled(max_tokens=8))
                    while runtime.busy:
                        runtime.step()
                stats = runtime.kvcache.stats()
            said.append(tokens)
            later = turns[1:]
            self._add({
                "part": "agents", "name": name, "turns": len(turns), "others_a_turn": options.others,
                "tokens_read": sum(row["tokens_read"] for row in turns),
                "from_host_bytes": sum(row["from_host_bytes"] for row in turns),
                "turns_from_host": sum(row["from_host_bytes"] > 0 for row in turns),
                "first_token_ms_p50": percentile([row["first_token_ms"] for row in later], 50),
                "first_token_ms_max": max(row["first_token_ms"] for row in later),
                "num_broken_pins": stats.num_broken_pins, "same_tokens": tokens == said[0], "rows": turns,
            })  # fmt: skip

    def disk(self) -> None:
        """A prompt that comes back from files."""
        options = self._options
        count = min(options.tokens, options.disk_tokens)
        sizes: dict[str, Any] = {"max_batch": 1, "max_context": count + 256}
        sizes |= {"host_cache_gib": options.host_gib}  # files are written slower than prompts are read
        sizes |= {"cache_dir": options.cache_dir, "cache_gib": options.cache_gib}
        prompt = self._text(count)
        with self._load(**sizes) as runtime:
            cold_s, cold = _ask(runtime, prompt, 8)
            begun = time.monotonic()
            _tiers(runtime).flush()
            write_s = time.monotonic() - begun
            _ask(runtime, prompt, 8)
            device_s, _ = _ask(runtime, prompt, 8)
        files = sorted(options.cache_dir.rglob("*.chunk"))
        disk_s = min(_read_files(files) for _ in range(3))
        _leave_page_cache(files)
        with self._load(**sizes) as runtime:
            _ask(runtime, self._text(300), 4)
            before = _hits(runtime)
            found_s, tokens = _ask(runtime, prompt, 8)
            after = _hits(runtime)
            num_bytes = sum(path.stat().st_size for path in files)
            self._add({
                "part": "disk", "prompt_tokens": count, "files": len(files), "bytes": num_bytes,
                "tokens_read": count - (after["tokens"] - before["tokens"]), "read_s": cold_s, "write_s": write_s,
                "restore_s": found_s - device_s, "disk_s": disk_s, "disk_gb_per_s": num_bytes / disk_s / 1e9,
                "of_disk_speed": disk_s / max(1e-9, found_s - device_s), "same_tokens": tokens == cold,
            })  # fmt: skip

    def _load(self, **sizes: Any) -> Runtime:
        options = self._options
        model = options.model
        release(self._device)
        if options.geometry is not None:
            model = random_target(known_geometry(options.geometry), Path(self._folder.name), device=self._device)
        return Runtime.load(model, device=options.device, **sizes)

    def _text(self, count: int, source: torch.Generator | None = None) -> list[int]:
        return torch.randint(0, self._options.vocab, (count,), generator=source or self._source).tolist()

    def _add(self, row: dict[str, Any]) -> None:
        options = self._options
        plain = {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}
        self.rows.append(plain)
        result = {
            "model": options.geometry or str(options.model),
            "weights": "random" if options.geometry else "the model's",
            **stamps_of(self._device, options.commit),
            "elapsed_s": round(time.monotonic() - self.begun, 1),
            "rows": self.rows,
        }
        write_json(options.out, result)
        print(json.dumps({name: value for name, value in plain.items() if name != "rows"}), flush=True)


def _sampled(max_tokens: int, seed: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, temperature=0.8, ignore_eos=True)


def _tiers(runtime: Runtime) -> CacheTiers:
    tiers = runtime.kvcache.tiers
    if tiers is None:
        raise SystemExit("the runtime has no tiers: give --host-gib")
    return tiers


def _ask(
    runtime: Runtime, prompt: list[int], count: int, *, seed: int = 1, session: str | None = None
) -> tuple[float, list[int]]:
    """The time to the first token, seconds, and all tokens."""
    tokens, first = list[int](), 0.0
    begin = time.perf_counter()
    runtime.submit(prompt, _sampled(max_tokens=count, seed=seed), session=session)
    while runtime.busy:
        for output in runtime.step():
            first = first or time.perf_counter() - begin
            tokens += output.token_ids
    return first, tokens


def _decodes(runtime: Runtime) -> bool:
    return any(slot["phase"] == "decoding" for slot in runtime.slots())


def _hits(runtime: Runtime) -> dict[str, int]:
    tiers = runtime.kvcache.tiers
    own = {"bytes_in": 0} if tiers is None else {"bytes_in": int(tiers.stats()["bytes_in"])}
    return {"tokens": runtime.kvcache.stats().hit_tokens, **own}


def _bus_bytes_per_s(device: torch.device) -> float:
    """The rate of copies of pinned memory to the device, the best of five."""
    if device.type != "cuda":
        return float("inf")
    host = torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(BUS_BYTES, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return BUS_BYTES / best


def _leave_page_cache(files: Sequence[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_files(files: Sequence[Path]) -> float:
    """Seconds in which as many threads as the tiers have read all files, into memory that is there."""
    _leave_page_cache(files)
    largest = max(path.stat().st_size for path in files)
    buffers = [memoryview(torch.zeros(largest, dtype=torch.uint8).numpy()) for _ in range(NUM_READERS)]  # type: ignore[arg-type]

    def read(number: int) -> None:
        for path in files[number::NUM_READERS]:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffers[number]):
                    pass

    begin = time.perf_counter()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(read, range(NUM_READERS)))
    return time.perf_counter() - begin


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, device="auto")
    parser.add_argument("--geometry", help="a name in geometries.toml, with random weights")
    parser.add_argument("--model", type=Path, help="a target's directory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=100_000, help="of the prompt that is restored")
    parser.add_argument("--disk-tokens", type=int, default=100_000, help="of that from files, at most")
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--cache-dir", type=Path, default=Path("/tmp/lowlat-sessions-cache"))
    parser.add_argument("--cache-gib", type=float, default=24.0)
    parser.add_argument("--throttle", type=float, default=10.0, help="GB/s of the throttled copies")
    parser.add_argument("--calls", type=int, nargs="+", default=[CALL_MOVES], help="copies in a call of the driver")
    parser.add_argument("--steps", type=int, default=400, help="steps of each kind")
    parser.add_argument("--seconds", type=float, default=60.0, help="for such steps, of each kind, at most")
    parser.add_argument("--system", type=int, default=8192, help="tokens of the agent's system prompt")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tool", type=int, default=400, help="tokens that a turn adds besides the last answer")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--others", type=int, default=6, help="other prompts after each turn")
    parser.add_argument("--vocab", type=int, default=90, help="prompts have token ids below it")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no part after so long")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    options = parser.parse_args(arguments)
    if (options.geometry is None) == (options.model is None):
        parser.error("give --geometry or --model")
    return options


if __name__ == "__main__":
    sys.exit(main())
