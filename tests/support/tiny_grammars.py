"""Grammars over token ids for tests: deterministic automata that implement `GrammarState`."""

import random
import time
from collections.abc import Mapping, Sequence

import numpy as np

from lowlat import Runtime, SamplingParams
from lowlat.errors import RequestError
from lowlat.text.grammar.state import GrammarState

Edges = Mapping[int, Mapping[int, int]]  # by state: the next state by token


class Automaton:
    """A request's place in an automaton; a state without edges is the end, where the end ids alone may follow.

    `num_filled` counts rows, `asked` keeps the tokens of every call of `fill`.
    """

    def __init__(self, edges: Edges, end_ids: Sequence[int] = (), start: int = 0) -> None:
        self.edges, self.end_ids, self.state = edges, tuple(end_ids), start
        self.taken: list[int] = []
        self.asked: list[tuple[int, ...]] = []
        self._masks: dict[int, np.ndarray] = {}  # by state

    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """See `GrammarState`."""
        assert len(tokens) == len(parents) == len(masks)
        assert parents[0] == -1
        self.asked.append(tuple(tokens))
        states: list[int | None] = []
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            assert -1 <= parent < row or row == 0
            above = self.state if row == 0 else states[parent]
            states.append(above if row == 0 or above is None else self._next(above, token))
            here = states[row]
            masks[row] = -1 if here is None else self._mask(here, masks.shape[1])

    def _mask(self, state: int, num_words: int) -> np.ndarray:
        if state not in self._masks:
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[list(self.edges.get(state) or self.end_ids)] = 1
            self._masks[state] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._masks[state]

    def _next(self, state: int, token: int) -> int | None:
        if not self.edges.get(state):
            return state if token in self.end_ids else None
        return self.edges[state].get(token)

    def advance(self, tokens: Sequence[int]) -> None:
        """See `GrammarState`."""
        for token in tokens:
            following = self._next(self.state, token)
            if following is None:
                raise RequestError(f"the grammar forbids token {token} after {self.taken}")
            self.state = following
            self.taken.append(token)

    @property
    def active(self) -> bool:
        """Always."""
        return True

    @property
    def terminated(self) -> bool:
        """Whether it is at an end."""
        return not self.edges.get(self.state)

    def forced(self, limit: int) -> list[int]:
        """The only tokens that may follow, until there is a choice."""
        found: list[int] = []
        state = self.state
        while len(found) < limit and len(self.edges.get(state, ())) == 1:
            token, state = next(iter(self.edges[state].items()))
            found.append(token)
        return found


class Breaking(Automaton):
    """An automaton that fails in its n-th call of `fill`, 0 the first."""

    def __init__(self, edges: Edges, n: int) -> None:
        super().__init__(edges)
        self.n = n

    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """See `GrammarState`."""
        super().fill(tokens, parents, masks)
        if len(self.asked) > self.n:
            raise RequestError(f"call {self.n} fails")


class Slow(Automaton):
    """An automaton whose masks come late, longer after the launch than the step takes, and so does what it forces."""

    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """See `GrammarState`."""
        super().fill(tokens, parents, masks)
        if len(self.taken) % 5 == 0:
            time.sleep(0.02)

    def forced(self, limit: int) -> list[int]:
        """See `Automaton`."""
        if len(self.taken) % 7 == 0:
            time.sleep(0.02)
        return super().forced(limit)


def random_edges(seed: int, vocab_size: int, num_states: int = 12, most: int = 9, forced: float = 0.3) -> Edges:
    """An automaton without an end: some states allow one token, others up to `most`."""
    source = random.Random(seed)
    edges: dict[int, dict[int, int]] = {}
    for state in range(num_states):
        count = 1 if source.random() < forced else source.randint(2, most)
        edges[state] = {token: source.randrange(num_states) for token in source.sample(range(vocab_size), count)}
    return edges


def documents(*lengths: int) -> Edges:
    """A grammar of documents without an end: a token of many, or of few, then a text of each length in turn."""
    edges: dict[int, dict[int, int]] = {}
    for number, length in enumerate(lengths):
        first = len(edges)
        choices = range(3 + number, 90, 1 + number % 3)
        edges[first] = dict.fromkeys(choices, first + 1)
        for place in range(length):
            edges[first + 1 + place] = {(7 * place + 11 * number) % 97: first + 2 + place}
    edges[len(edges) - 1] = dict.fromkeys(edges[len(edges) - 1], 0)
    return edges


def accepts(edges: Edges, tokens: Sequence[int], end_ids: Sequence[int] = ()) -> bool:
    """Whether an automaton allows these tokens from its start on."""
    try:
        Automaton(edges, end_ids).advance(tokens)
    except RequestError:
        return False
    return True


def submit_with(runtime: Runtime, grammar: GrammarState, prompt: Sequence[int], sampling: SamplingParams) -> str:
    """Submit a request whose tokens a grammar restricts."""
    name: str = runtime.submit(prompt, sampling)
    runtime._requests[name].grammar = grammar
    return name
