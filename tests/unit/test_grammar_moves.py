"""Requests with a grammar and without that join, end, fail and are cancelled while steps stand after those that run.

The device works on at any moment, as far as it may: within calls of the grammar, too.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from fake_device import FakeDevice, load_fake
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import check_invariants, prompt_of, run_all
from tiny_grammars import Automaton, Edges, submit_with
from tiny_models import PairPaths, make_pair
from unit.test_grammar_masks import FORKS, NARROW, ON_DEVICE, WIDE
from unit.test_lossless import OPTIONS, params

from lowlat import Runtime, SpeculativeConfig
from lowlat.errors import RequestError


class Interleaved(Automaton):
    """An automaton at each of whose calls the device works on, as far as it can."""

    def __init__(self, edges: Edges, device: FakeDevice, end_ids: tuple[int, ...] = (), fails_at: int = 99) -> None:
        super().__init__(edges, end_ids)
        self.device, self.fails_at = device, fails_at

    def fill(self, tokens: Any, parents: Any, masks: Any) -> None:
        self.device._hurry()
        super().fill(tokens, parents, masks)
        if len(self.asked) > self.fails_at:
            raise RequestError("it fails")
        self.device._hurry()

    def advance(self, tokens: Any) -> None:
        self.device._hurry()
        super().advance(tokens)

    def forced(self, limit: int) -> list[int]:
        self.device._hurry()
        return super().forced(limit)


KINDS: list[tuple[Edges | None, tuple[int, ...], int]] = [
    *((None, (), 99), (WIDE, (), 99), (NARROW, (), 99)),
    *((FORKS, (), 99), (WIDE, (), 2)),  # one that ends soon, one that fails
]


class Played:
    """Runtimes on a fake device, with a loop of its own and without, and the tokens that each kind has alone."""

    def __init__(self, pair: PairPaths) -> None:
        self.sampling = params("sampled", max_tokens=14)
        with Runtime.load(pair.target, **OPTIONS) as runtime:
            self.expected = []
            for edges, end_ids, _ in KINDS:
                own = None if edges is None else Automaton(edges, end_ids)
                name = self._submit(runtime, own)
                self.expected.append(run_all(runtime)[name])
        draft = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True)
        loads = [load_fake(pair.target, draft, device_loop=loops, **ON_DEVICE) for loops in (False, True)]
        self.runtimes = dict(enumerate(loads))

    def _submit(self, runtime: Runtime, grammar: Automaton | None) -> str:
        if grammar is None:
            return str(runtime.submit(prompt_of(7), self.sampling))
        return str(submit_with(runtime, grammar, prompt_of(7), self.sampling))

    def play(self, which: int, lead: int, moves: list[tuple[str, int]]) -> None:
        """Make moves, then step to the end: nobody waits for ever, and each has the tokens that it has alone."""
        runtime, device = self.runtimes[which]
        device.lead = lead
        names: dict[str, int] = {}
        tokens: dict[str, list[int]] = defaultdict(list)
        gone: set[str] = set()
        for move, number in [*moves, *[("step", 0)] * 200]:
            if move == "submit":
                edges, end_ids, fails_at = KINDS[number % len(KINDS)]
                grammar = None if edges is None else Interleaved(edges, device, end_ids, fails_at)
                names[self._submit(runtime, grammar)] = number % len(KINDS)
            elif move == "cancel" and (live := sorted(runtime._requests)):
                gone.add(live[number % len(live)])
                runtime.cancel(live[number % len(live)])
            elif move == "limit" and (live := sorted(runtime._requests)):
                runtime.set_draft_limit(live[number % len(live)], number % 4)
            elif move == "step":
                for output in runtime.step([None, None, None, 0][number % 4]):
                    tokens[output.request_id] += output.token_ids
        assert not runtime.busy
        device.synchronize()
        check_invariants(runtime)
        for name, kind in names.items():
            expected = self.expected[kind]
            cut = name in gone or KINDS[kind][2] < 99
            assert tokens[name] == (expected[: len(tokens[name])] if cut else expected), (name, kind)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Runtimes of a small target and its draft model."""
    made = Played(make_pair(tmp_path_factory.mktemp("pair"), "llama"))
    yield made
    for runtime, _ in made.runtimes.values():
        runtime.close()


MOVES = st.tuples(st.sampled_from(("submit", "step", "step", "step", "cancel", "limit")), st.integers(0, 59))


@given(which=st.integers(0, 1), lead=st.integers(0, 3), moves=st.lists(MOVES, max_size=50))
@settings(max_examples=10)
def test_whatever_happens_between_two_steps(
    which: int, lead: int, moves: list[tuple[str, int]], played: Played
) -> None:
    """Requests come, end, fail and are cancelled with steps queued after the one that runs."""
    played.play(which, lead, moves)
