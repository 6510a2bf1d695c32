"""Requests that are paused, resumed, cancelled and outranked at any moment, against the tokens of each alone."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from recording import check_invariants, run_all

from lowlat import Runtime, SamplingParams
from lowlat.engine.scheduling.records import Phase
from lowlat.errors import RequestError

__all__ = ["MOVES", "Requested", "alone", "moves", "paused_each_step", "play", "random_moves"]

Requested = tuple[Sequence[int], SamplingParams]
MOVES = ("submit", "pause", "resume", "cancel", "step", "step", "step")
Move = tuple[str, int]
Submit = Callable[[Runtime, int, int], str]  # a request by its number, of a priority


def moves(most: int = 40) -> st.SearchStrategy[list[Move]]:
    """Moves, each with a number that says of which request, or of what priority."""
    return st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 11)), max_size=most)


def random_moves(seed: int, count: int) -> list[Move]:
    """The same at random."""
    source = random.Random(seed)
    return [(source.choice(MOVES), source.randrange(12)) for _ in range(count)]


def alone(runtime: Runtime, requests: Sequence[Requested]) -> list[list[int]]:
    """The tokens of each request, with nobody next to it."""
    found = []
    for prompt, params in requests:
        name = runtime.submit(prompt, params)
        found.append(run_all(runtime)[name])
    return found


def play(
    runtime: Runtime,
    plan: Sequence[Move],
    requests: Sequence[Requested],
    expected: Sequence[Sequence[int]],
    submit: Submit | None = None,
) -> int:
    """Make moves, resume all and step to the end: each request has the tokens that it has alone, or begins with them.

    Returns how often a request was paused in its slot.
    """
    numbers: dict[str, int] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    gone: set[str] = set()
    num_paused = 0

    def is_(phase: Phase) -> list[str]:
        return sorted(name for name in runtime._requests if runtime.scheduler.phase(name) is phase)

    def step() -> None:
        may_go_on, phases = runtime.busy, [runtime.scheduler.phase(name) for name in runtime._requests]
        outputs = runtime.step()
        if not may_go_on:
            assert not outputs and phases == [runtime.scheduler.phase(name) for name in runtime._requests]
        for output in outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids

    def obey(move: str, number: int) -> None:
        nonlocal num_paused
        if move == "submit" and not runtime.scheduler.is_full:
            which, priority = number % len(requests), number % 3
            if submit is None:
                prompt, params = requests[which]
                name = runtime.submit(prompt, _with_priority(params, priority))
            else:
                name = submit(runtime, which, priority)
            numbers[name] = which
        elif move == "pause" and (live := [name for name in runtime._requests if name not in is_(Phase.PAUSED)]):
            name = live[number % len(live)]
            decodes = runtime.scheduler.phase(name) is Phase.DECODING
            num_paused += runtime.pause(name) and decodes
        elif move == "resume" and (paused := is_(Phase.PAUSED)):
            runtime.resume(paused[number % len(paused)])
        elif move == "cancel" and number < 2 and (live := list(runtime._requests)):
            gone.add(live[number % len(live)])
            runtime.cancel(live[number % len(live)])
        elif move == "step":
            step()
        check_invariants(runtime)

    for move, number in plan:
        obey(move, number)
    for name in is_(Phase.PAUSED):
        runtime.resume(name)
    for _ in range(600):
        if not runtime.busy:
            break
        step()
    assert not runtime.busy and not runtime._requests and not runtime.scheduler.space.held
    check_invariants(runtime)
    for name, which in numbers.items():
        whole = list(expected[which])
        assert tokens[name] == (whole[: len(tokens[name])] if name in gone else whole), (name, which)
    return num_paused


def _with_priority(params: SamplingParams, priority: int) -> SamplingParams:
    return replace(params, priority=priority)


def paused_each_step(runtime: Runtime, request: Requested, **others: Any) -> list[int]:
    """The tokens of a request that is paused and resumed between all of its steps."""
    name = runtime.submit(*request, **others)
    tokens: list[int] = []
    while runtime.busy:
        for output in runtime.step():
            tokens += output.token_ids
        try:
            if runtime.pause(name):
                runtime.resume(name)
        except RequestError:
            break
    while runtime.busy:
        tokens += [token for output in runtime.step() for token in output.token_ids]
    check_invariants(runtime)
    return tokens
