"""This program moves sessions and requests at random, on the reference executor: tokens must equal decoding alone.

    python -m bench.session_moves --moves 1000000 --limit-s 36000 --out bench/results/cpu/session_moves.json

Requests are submitted with priorities and with sessions, paused, resumed and cancelled; prompts are opened, grow, are
finished on trial and for good; sessions are opened, forked, ended, saved and loaded; between these the runtime steps.
What a request brings is compared, after every step, with the answer of a runtime that does one request after the other,
without sessions, shared prefixes or drafts (S = 0). --append adds to the counts of a file that is there; give another
--seed then. `Moves` is what a machine of Hypothesis and a long run share.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.lib.conditions import bench_parser, stamps_of, write_json
from bench.lib.subjects import known_geometry
from lowlat import Runtime, SamplingParams, Session, SpeculativeConfig
from lowlat.engine.requests.open_prompts import OpenPrompt
from lowlat.errors import CapacityError, RequestError
from lowlat.models.target import OpenedTarget
from lowlat.tools.bench.geometry import Geometry, random_target

__all__ = ["KINDS", "Alone", "Moves", "main", "make_model"]

CHUNK = 4
SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 64,
    "block_size": 2,
    "prefill_chunk": CHUNK,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
BASES = ([1] * 20, [1] * 8 + [2] * 12, [3, 4] * 10)  # prefixes collide often
LONGEST = 40  # tokens of a prompt, at most
MOST_TOKENS = 6  # of an answer
MAX_SESSIONS, MAX_OPEN, MAX_LIVE = 6, 3, 14
CHECK_EVERY = 100  # moves
KINDS: dict[str, float] = {"step": 12, "submit": 12, "pause": 20, "resume": 20, "append": 10, "cancel": 5, "fork": 5}
KINDS |= {"open_prompt": 4, "finish_on_trial": 3, "finish": 4, "close": 4, "open": 3, "save": 0.1}


def make_model(directory: Path) -> OpenedTarget:
    """A target of which a step takes little."""
    own = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    geometry = Geometry(target={**known_geometry("tiny").target, **own, "intermediate_size": 16, "vocab_size": 17})
    return random_target(geometry, directory)


class Alone:
    """Answers of a runtime that does one request after the other, and shares nothing."""

    def __init__(self, model: OpenedTarget) -> None:
        self.runtime = Runtime.load(model, max_batch=1, prefix_reuse=False, max_prefill_chunks=16, **SIZES)
        self._known: dict[tuple[tuple[int, ...], int | None], list[int]] = {}

    def answer(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        """All tokens of a request. Those of a shorter one are the first of them."""
        key = (prompt, params.seed)
        if key not in self._known:
            self.runtime.submit(prompt, _params(MOST_TOKENS, params.seed or 0))
            tokens: list[int] = []
            while self.runtime.busy:
                for output in self.runtime.step():
                    tokens += output.token_ids
            self._known[key] = tokens
        return self._known[key][: params.max_tokens]


def _params(max_tokens: int, seed: int, priority: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=seed, ignore_eos=True, priority=priority)


@dataclass(eq=False)
class _Live:
    """A request that has not ended: the tokens that came, and all that will; None: its prompt may still grow."""

    expected: list[int] | None
    came: list[int] = field(default_factory=list)
    cancelled: bool = False
    paused: bool = False


@dataclass(eq=False)
class _Opened:
    """A prompt that may still grow, and the text that it will be the begin of."""

    handle: OpenPrompt
    params: SamplingParams
    text: list[int]
    prompt: list[int] = field(default_factory=list)


class Moves:
    """A runtime with sessions, little memory, drafts and a host tier; each move checks what it brings."""

    def __init__(self, model: OpenedTarget, alone: Alone, folder: Path) -> None:
        sizes: dict[str, Any] = {"max_batch": 4, "kv_blocks": 90, "max_queue": 8, "max_prefill_chunks": 4, **SIZES}
        self.runtime = Runtime.load(model, NGRAM, host_cache_gib=0.001, **sizes)
        self._alone, self._file = alone, folder / "moves.session"
        self.sessions: list[Session] = []
        self.live: dict[str, _Live] = {}
        self.opened: dict[str, _Opened] = {}
        self.made: Counter[str] = Counter()  # moves by kind: those that could be made
        self.num_ended = self._num_names = 0

    def submit(
        self, base: int, length: int, max_tokens: int, seed: int, which: int, *, goes_on: bool, priority: int = 0
    ) -> bool:
        """A request, of a session or of none, which may go on from what that has said."""
        if len(self.live) >= MAX_LIVE:
            return False
        session = self._session(which)
        prompt = tuple(BASES[base % len(BASES)][: 1 + length % 20])
        if session is not None and goes_on and len(session.token_ids) < LONGEST - 3:
            prompt = (*session.token_ids, *prompt[:3])
        params = _params(max_tokens, seed, priority)
        try:
            name = self.runtime.submit(prompt, params, session=session)
        except CapacityError:
            return False
        self.live[name] = _Live(self._alone.answer(prompt, params))
        return True

    def _session(self, which: int) -> Session | None:
        return self.sessions[which % len(self.sessions)] if self.sessions and which % 3 else None

    def step(self) -> bool:
        """One step; what came is what a request alone would have had."""
        for output in self.runtime.step():
            own = self.live[output.request_id]
            assert own.expected is not None or not output.token_ids, "an answer to an open prompt came out"
            own.came += output.token_ids
            expected = own.expected or []
            assert own.came == expected[: len(own.came)], (output.request_id, own.came, expected)
            if output.finish_reason is not None:
                assert output.error is None and (own.cancelled or own.came == expected), output
                self.num_ended += 1
                del self.live[output.request_id]
        return True

    def pause(self, which: int) -> bool:
        """A request gives its slot, or its place in the queue, away."""
        if not (names := sorted(name for name, own in self.live.items() if not own.cancelled and not own.paused)):
            return False
        name = names[which % len(names)]
        try:
            self.live[name].paused = self.runtime.pause(name)
        except RequestError:
            assert name in self.opened or self._has_ended(name)
        return True

    def _has_ended(self, name: str) -> bool:
        """Whether a request has ended in a pause, which takes what is under way: its last output comes now."""
        self.step()
        return name not in self.live

    def resume(self, which: int) -> bool:
        """A paused request goes on."""
        if not (names := sorted(name for name, own in self.live.items() if own.paused)):
            return False
        name = names[which % len(names)]
        self.runtime.resume(name)
        self.live[name].paused = False
        return True

    def cancel(self, which: int) -> bool:
        """End a request before its time, wherever it is."""
        if not (names := sorted(name for name, own in self.live.items() if not own.cancelled)):
            return False
        name = names[which % len(names)]
        try:
            self.runtime.cancel(name)
        except RequestError:
            assert self._has_ended(name)
            return False
        self.live[name].cancelled, self.live[name].paused = True, False
        self.opened.pop(name, None)
        return True

    def open_prompt(self, base: int, max_tokens: int, seed: int, which: int, priority: int = 0) -> bool:
        """A request whose prompt is still to come, of a session or of none."""
        if len(self.opened) >= MAX_OPEN or len(self.live) >= MAX_LIVE:
            return False
        params, session = _params(max_tokens, seed, priority), self._session(which)
        try:
            handle = self.runtime.open_prompt(params, session=session, max_prompt_tokens=LONGEST)
        except CapacityError:
            return False
        self.live[handle.request_id] = _Live(None)
        self.opened[handle.request_id] = _Opened(handle, params, BASES[base % len(BASES)] * 2)
        return True

    def append(self, which: int, count: int) -> bool:
        """More of an open prompt, also after its end on trial."""
        opened = self._opened(which)
        if opened is None:
            return False
        own = opened.text[len(opened.prompt) : len(opened.prompt) + count]
        opened.handle.append(own)
        opened.prompt += own
        return True

    def finish(self, which: int, *, on_trial: bool) -> bool:
        """The end of an open prompt."""
        opened = self._opened(which)
        if opened is None or not opened.prompt:
            return False
        opened.handle.finish(speculative=on_trial)
        if not on_trial:
            name = opened.handle.request_id
            self.live[name].expected = self._alone.answer(tuple(opened.prompt), opened.params)
            del self.opened[name]
        return True

    def _opened(self, which: int) -> _Opened | None:
        return list(self.opened.values())[which % len(self.opened)] if self.opened else None

    def open(self) -> bool:
        """A new session."""
        if len(self.sessions) >= MAX_SESSIONS:
            return False
        self.sessions.append(self.runtime.session(self._name(), cache_salt=("", "a")[self._num_names % 2]))
        return True

    def fork(self, which: int) -> bool:
        """Another session that goes on from the same place."""
        if not self.sessions or len(self.sessions) >= MAX_SESSIONS:
            return False
        self.sessions.append(self.sessions[which % len(self.sessions)].fork(self._name()))
        return True

    def close(self, which: int) -> bool:
        """A session's end, also while it has requests."""
        if self.sessions:
            self.sessions.pop(which % len(self.sessions)).close()
            return True
        return False

    def save(self, which: int) -> bool:
        """A session goes to a file, and another one goes on from that."""
        if not self.sessions or len(self.sessions) >= MAX_SESSIONS:
            return False
        session = self.sessions[which % len(self.sessions)]
        try:
            session.save(self._file)
        except RequestError:
            assert not session.token_ids
            return False
        loaded = self.runtime.load_session(self._file, session_id=self._name(), cache_salt=session.cache_salt)
        assert loaded.token_ids == session.token_ids
        self.sessions.append(loaded)
        return True

    def move(self, source: random.Random) -> None:
        """A move at random, which counts where it could be made."""
        kind = source.choices(list(KINDS), list(KINDS.values()))[0]
        which, base, length, most = (source.randrange(each) for each in (100, 30, 30, MOST_TOKENS))
        seed, priority = source.randrange(2), source.randrange(3)
        if kind == "submit":
            goes_on = source.random() < 0.3
            made = self.submit(base, length, 1 + most, seed, which, goes_on=goes_on, priority=priority)
        elif kind == "open_prompt":
            made = self.open_prompt(base, 1 + most, seed, which, priority)
        elif kind == "append":
            made = self.append(which, 1 + length % 9)
        elif kind in ("finish", "finish_on_trial"):
            made = self.finish(which, on_trial=kind != "finish")
        elif kind in ("step", "open"):
            made = getattr(self, kind)()
        else:
            made = getattr(self, kind)(which)
        self.made[kind] += made

    def check(self) -> None:
        """The books balance."""
        self.runtime.kvcache.invariants()
        self.runtime.scheduler.invariants()

    def end(self) -> None:
        """All that is live ends, and nothing is held."""
        for name, opened in list(self.opened.items()):
            if opened.prompt:
                self.finish(list(self.opened).index(name), on_trial=False)
            else:
                self.runtime.cancel(name)
                self.live[name].cancelled = True
                del self.opened[name]
        while self.resume(0):
            pass
        while self.runtime.busy:
            self.step()
        for session in self.sessions:
            session.close()
        self.sessions.clear()
        if self.runtime.kvcache.tiers is not None:
            self.runtime.kvcache.tiers.flush()  # copies hold blocks while they are under way
        self.check()
        held, space = self.runtime.kvcache.stats(), self.runtime.scheduler.space
        assert not self.live and not space.held, (self.live, space.held)
        assert held.num_pinned == held.num_used == 0, held

    def _name(self) -> str:
        self._num_names += 1
        return f"s{self._num_names}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make moves at random, and write how many there were; a wrong token ends it with what was done until then."""
    parser = bench_parser(__doc__, device=None)
    parser.add_argument("--moves", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--every-s", type=float, default=60.0, help="the file is written as often")
    parser.add_argument("--append", action="store_true", help="add to the counts of the file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before = json.loads(options.out.read_text()) if options.append and options.out.exists() else {}
    begun = written = time.monotonic()
    cpu = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "target")
        moves, source = Moves(model, Alone(model), Path(folder)), random.Random(options.seed)

        def write(different: str | None = None) -> None:
            kinds = Counter(before.get("kinds", {})) + moves.made
            seconds = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - cpu}
            write_json(options.out, {
                **stamps_of(torch.device("cpu"), options.commit),
                "seeds": [*before.get("seeds", []), options.seed],
                "moves": kinds.total(), "requests": before.get("requests", 0) + moves.num_ended,
                "different": before.get("different", 0) + (different is not None),
                **({} if different is None else {"first_difference": different[:2000]}),
                **{name: round(before.get(name, 0.0) + own, 1) for name, own in seconds.items()},
                "kinds": dict(kinds.most_common()),
            })  # fmt: skip

        tried = 0
        try:
            while moves.made.total() < options.moves and time.monotonic() - begun < options.limit_s:
                moves.move(source)
                tried += 1
                if tried % CHECK_EVERY == 0:
                    moves.check()
                if time.monotonic() - written > options.every_s:
                    written = time.monotonic()
                    write()
            moves.end()
        except AssertionError as error:
            write(f"seed {options.seed}, after {tried} tries: {error}")
            raise
        write()
    print(json.dumps({"moves": moves.made.total(), "requests": moves.num_ended, "cpu_s": time.process_time() - cpu}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
