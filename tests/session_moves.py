"""Moves of sessions, on the reference executor: submit, grow, step, cancel, fork, end, save, load, in any order.

    python tests/session_moves.py --moves 1000000 --limit-s 36000

Each request's tokens, whatever happens next to it, are those of a runtime without sessions, reuse or drafts (S = 0).
`Moves` is what a machine of Hypothesis and a long run share.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recording import check_invariants
from tiny_models import make_target

from lowlat import Runtime, SamplingParams, Session, SpeculativeConfig
from lowlat.engine.open_prompts import OpenPrompt
from lowlat.errors import CapacityError, RequestError

CHUNK = 4
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": 64, "block_size": 2} | {
    "prefill_chunk": CHUNK,
    "max_prefill_chunks": 2,
    "max_queue": 3,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
BASES = ([1] * 20, [1] * 8 + [2] * 12, [3, 4] * 10)  # prefixes collide often
MAX_SESSIONS = 6


def make_model(directory: Path) -> Path:
    """A target of which a step takes little."""
    fields = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    make_target(directory, "llama", num_attention_heads=1, num_key_value_heads=1, **fields)
    return directory


class Alone:
    """Answers of a runtime that does one request after the other, and shares nothing."""

    def __init__(self, model: Path) -> None:
        self.runtime = Runtime.load(model, max_batch=1, prefix_reuse=False, **SIZES)
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def answer(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        """All tokens of a request."""
        key = (prompt, params.max_tokens, params.seed)
        if key not in self._known:
            self.runtime.submit(prompt, params)
            tokens: list[int] = []
            while self.runtime.busy:
                for output in self.runtime.step():
                    tokens += output.token_ids
            if len(self._known) > 20_000:
                self._known.clear()
            self._known[key] = tokens
        return self._known[key]


class Moves:
    """A runtime with sessions, little memory, drafts and a host tier; each move checks what it brings."""

    def __init__(self, model: Path, alone: Alone, folder: Path) -> None:
        self.runtime = Runtime.load(model, NGRAM, max_batch=2, kv_blocks=70, host_cache_gib=0.001, **SIZES)
        self._alone, self._file = alone, folder / "moves.session"
        self.sessions: list[Session] = []
        self.live: dict[str, tuple[list[int], list[int]]] = {}  # tokens that came, and all that will
        self.growing: list[tuple[OpenPrompt, list[int]]] = []  # prompts that are being written, and what is to come
        self._cancelled: set[str] = set()
        self.num_moves = self.num_ended = self._num_names = 0

    def submit(self, base: int, length: int, max_tokens: int, seed: int, which: int, *, goes_on: bool) -> None:
        """A request, of a session or of none, which may go on from what that has said."""
        session, prompt, params = self._asked(base, length, max_tokens, seed, which, goes_on)
        try:
            name = self.runtime.submit(prompt, params, session=session)
        except CapacityError:
            return
        self.live[name] = ([], self._alone.answer(prompt, params))

    def begin(self, base: int, length: int, max_tokens: int, seed: int, which: int, *, goes_on: bool) -> None:
        """The same of which the prompt is to come."""
        session, prompt, params = self._asked(base, length, max_tokens, seed, which, goes_on)
        try:
            opened = self.runtime.open_prompt(params, session=session, max_prompt_tokens=len(prompt))
        except CapacityError:
            return
        self.growing.append((opened, list(prompt)))
        self.live[opened.request_id] = ([], self._alone.answer(prompt, params))

    def grow(self, which: int, count: int) -> None:
        """More of an open prompt, or its end where nothing is left."""
        if self.growing:
            opened, rest = each = self.growing[which % len(self.growing)]
            if rest:
                opened.append(rest[:count])
                del rest[:count]
            else:
                opened.finish()
                self.growing.remove(each)

    def guess(self, which: int) -> None:
        """An open prompt ends on trial; nothing is heard of that."""
        if self.growing:
            opened, _ = self.growing[which % len(self.growing)]
            if self.runtime._requests[opened.request_id].prompt:
                opened.finish(speculative=True)

    def _asked(
        self, base: int, length: int, max_tokens: int, seed: int, which: int, goes_on: bool
    ) -> tuple[Session | None, tuple[int, ...], SamplingParams]:
        session = self.sessions[which % len(self.sessions)] if self.sessions and which % 3 else None
        prompt = tuple(BASES[base % len(BASES)][: 1 + length % 20])
        if session is not None and goes_on and len(session.token_ids) < 40:
            prompt = (*session.token_ids, *prompt[:3])
        return session, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=seed, ignore_eos=True)

    def step(self) -> None:
        """One step; what came is what a request alone would have had."""
        for output in self.runtime.step():
            if output.request_id not in self.live:
                continue
            came, expected = self.live[output.request_id]
            came += output.token_ids
            assert came == expected[: len(came)], (output.request_id, came, expected)
            if output.finish_reason is not None:
                assert output.finish_reason == "cancelled" or came == expected
                self.num_ended += 1
                del self.live[output.request_id]
                self._cancelled.discard(output.request_id)

    def cancel(self, which: int) -> None:
        """End a request before its time."""
        if names := sorted(self.live.keys() - self._cancelled):
            name = names[which % len(names)]
            self.runtime.cancel(name)
            self.growing = [each for each in self.growing if each[0].request_id != name]
            self._cancelled.add(name)  # its last output comes with the next step

    def open(self) -> None:
        """A new session."""
        if len(self.sessions) < MAX_SESSIONS:
            self.sessions.append(self.runtime.session(self._name(), cache_salt="ab"[self._num_names % 2]))

    def fork(self, which: int) -> None:
        """Another session that goes on from the same place."""
        if self.sessions and len(self.sessions) < MAX_SESSIONS:
            self.sessions.append(self.sessions[which % len(self.sessions)].fork(self._name()))

    def close(self, which: int) -> None:
        """A session's end, also while it has requests."""
        if self.sessions:
            self.sessions.pop(which % len(self.sessions)).close()

    def save(self, which: int) -> None:
        """A session goes to a file, and another one goes on from that."""
        if not self.sessions or len(self.sessions) >= MAX_SESSIONS:
            return
        session = self.sessions[which % len(self.sessions)]
        try:
            session.save(self._file)
        except RequestError:
            assert not session.token_ids
            return
        loaded = self.runtime.load_session(self._file, session_id=self._name(), cache_salt=session.cache_salt)
        assert loaded.token_ids == session.token_ids
        self.sessions.append(loaded)

    def move(self, source: random.Random) -> None:
        """A move at random."""
        kind, which = source.random(), source.randrange(100)
        if kind < 0.2:
            base, length, most, seed = (source.randrange(each) for each in (30, 30, 6, 4))
            enter = self.begin if kind < 0.05 else self.submit
            enter(base, length, 1 + most, seed, which, goes_on=source.random() < 0.5)
        elif kind < 0.32:
            self.grow(which, source.randint(1, 9))
        elif kind < 0.35:
            self.guess(which)
        elif kind < 0.86:
            self.step()
        elif kind < 0.9:
            self.cancel(which)
        elif kind < 0.93:
            self.open()
        elif kind < 0.96:
            self.fork(which)
        elif kind < 0.99:
            self.close(which)
        else:
            self.save(which)
        self.num_moves += 1

    def check(self) -> None:
        """The books balance."""
        check_invariants(self.runtime)

    def end(self) -> None:
        """All that is live ends, and nothing is held."""
        while self.growing:
            self.grow(0, 20)
        while self.runtime.busy:
            self.step()
        for session in self.sessions:
            session.close()
        self.sessions.clear()
        self.check()
        assert not self.live and self.runtime.kvcache.stats().num_pinned == 0

    def _name(self) -> str:
        self._num_names += 1
        return f"s{self._num_names}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make moves at random and say how many there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    source, begun = random.Random(options.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "target")
        moves = Moves(model, Alone(model), Path(folder))
        while moves.num_moves < options.moves and time.monotonic() - begun < options.limit_s:
            moves.move(source)
            if moves.num_moves % 200 == 0:
                moves.check()
        moves.end()
    took = round(time.monotonic() - begun, 1)
    print(json.dumps({"moves": moves.num_moves, "requests": moves.num_ended, "different": 0, "seconds": took}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
