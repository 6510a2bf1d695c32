"""Requests under a grammar on several ranks: the tokens of one, whoever joins or leaves, however late a rank is."""

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from fake_device import load_fake
from late_ranks import LateRanks
from recording import prompt_of, run_all
from stages import wide
from tiny_grammars import Automaton, Breaking, random_edges, submit_with
from tiny_models import PairPaths, make_pair
from unit.test_lossless import OPTIONS, params

from lowlat import Runtime, SpeculativeConfig
from lowlat.executors import make
from lowlat.executors.reference.ranks import RankedReferenceExecutor

WIDE, NARROW = random_edges(3, 97, num_states=5, most=70, forced=0.0), random_edges(1, 97)
ALIKE: dict[str, Any] = {**OPTIONS, "tp_invariant": True}
# all that decides what a rank does next, and what it has told
SAME = (
    *("tokens", "lengths", "active", "drafts", "num_drafts", "tree_masks", "tree_paths", "slot_ints", "output_counts"),
    *("ring_head", "ring_records", "ring_tokens", "grammar_tokens", "grammar_paths", "grammar_lengths"),
)
WIDTHS = (
    "length_probabilities",
    "length_runs",
    "length_expected",
    "length_last",
    "length_waited",
    "draft_length_choice",
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target and its draft model, both of which two ranks share."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


def speculation(pair: PairPaths, depth: int, **options: Any) -> SpeculativeConfig | None:
    return SpeculativeConfig(model=pair.head, num_speculative_tokens=depth, strict=True, **options) if depth else None


def check_alike(executor: RankedReferenceExecutor) -> None:
    """The ranks' control state is the same, bit for bit."""
    first, *others = (executor.peer_state(rank) for rank in range(len(executor._peers) + 1))
    for own in others:
        for name in (*SAME, *(WIDTHS if "length_probabilities" in own else ())):
            assert torch.equal(own[name], first[name]), name


def expected_of(pair: PairPaths, requests: list[tuple[Any, list[int], Any]]) -> list[list[int]]:
    """The tokens of each request alone, on one rank, without drafts."""
    found = []
    with Runtime.load(pair.target, **ALIKE) as runtime:
        for edges, prompt, sampling in requests:
            name = submit(runtime, edges, prompt, sampling)
            found.append(run_all(runtime)[name])
    return found


def submit(runtime: Runtime, edges: Any, prompt: list[int], sampling: Any) -> str:
    if edges is not None:
        return submit_with(runtime, Automaton(edges), prompt, sampling)
    name: str = runtime.submit(prompt, sampling)
    return name


REQUESTS = [
    (WIDE, prompt_of(19), params("sampled", max_tokens=18)),
    (None, prompt_of(7, seed=1), params("penalised", max_tokens=18)),
    (NARROW, prompt_of(19), params("sampled", max_tokens=18)),
]


@pytest.mark.second
@pytest.mark.parametrize(("depth", "size"), [(3, 2), wide(0, 2), wide(7, 2)])
def test_ranks_draw_what_one_draws(depth: int, size: int, pair: PairPaths) -> None:
    """Those that come and go next to them change nothing."""
    expected, source = expected_of(pair, REQUESTS), random.Random(depth)
    options = {**ALIKE, "tensor_parallel_size": size, "max_queue": 16}
    with Runtime.load(pair.target, speculation(pair, depth), **options) as runtime:
        tokens = run_beside(runtime, source)
        assert tokens == expected
        assert isinstance(runtime.executor, RankedReferenceExecutor)
        check_alike(runtime.executor)
        assert runtime.summary()["structured_output"]["num_requests"] > 5


def run_beside(runtime: Runtime, source: random.Random) -> list[list[int]]:
    """The tokens of REQUESTS, next to others that join, end, fail and are cancelled at any time."""
    names: list[str] = []
    others: list[str] = []
    tokens: dict[str, list[int]] = {}
    for number in range(400):
        if number % 7 == 3 and len(names) < len(REQUESTS):
            names.append(submit(runtime, *REQUESTS[len(names)]))
        elif source.random() < 0.3 and runtime.scheduler.num_queued < 3:
            own = params("sampled", seed=number, max_tokens=source.randrange(1, 12))
            prompt = prompt_of(source.randrange(1, 30), seed=number)
            grammar = source.choice([None, Automaton(NARROW), Automaton(WIDE), Breaking(WIDE, source.randrange(4))])
            others.append(
                runtime.submit(prompt, own) if grammar is None else submit_with(runtime, grammar, prompt, own)
            )
        elif source.random() < 0.2 and others and others[0] in runtime._requests:
            runtime.cancel(others.pop(0))
        for output in runtime.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if len(names) == len(REQUESTS) and not set(names) & runtime._requests.keys():
            break
    run_all(runtime)
    return [tokens[name] for name in names]


@contextmanager
def late_runtime(
    pair: PairPaths,
    speculative: SpeculativeConfig | None,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    **options: Any,
) -> Iterator[tuple[Runtime, Callable[[], None]]]:
    """A runtime of two ranks, one of which is late; and what checks, when nothing is under way, that they are alike."""
    monkeypatch.setattr(make, "RankedReferenceExecutor", LateRanks)
    given = {name: value for name, value in {**ALIKE, **options}.items() if name != "device"}
    runtime, device = load_fake(pair.target, speculative, device_loop=False, seed=seed, tensor_parallel_size=2, **given)
    late: Any = device.inner

    def check() -> None:
        device.synchronize()
        assert late.most_owed > 10
        late.catch_up()
        check_alike(late)

    with closing(runtime):
        yield runtime, check


@pytest.mark.parametrize(
    ("depth", "chance", "options"),
    [
        wide(0, 0.0, {}),
        wide(3, 0.3, {}),
        (3, 0.0, {"adaptive_width": True}),
        wide(2, 0.3, {"tree": [[0], [1], [0, 0]]}),
    ],
)
@pytest.mark.second
def test_a_rank_that_is_late_reads_what_the_first_has_read(
    depth: int, chance: float, options: dict[str, Any], pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are queued ahead, and every rank but the first has drawn no sooner than anybody waits for it."""
    expected = expected_of(pair, REQUESTS)
    monkeypatch.setattr(LateRanks, "chance", chance)
    monkeypatch.setattr(LateRanks, "seed", 1)
    speculative = speculation(pair, depth, **options)
    with late_runtime(pair, speculative, monkeypatch, 1, max_queue=16) as (runtime, check):
        assert run_beside(runtime, random.Random(1)) == expected
        check()


@pytest.mark.parametrize("depth", [wide(0), 3])
@pytest.mark.second
def test_a_late_rank_has_drawn_before_its_slot_has_another_request(
    depth: int, pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends by its length, or is cancelled amid a step, and another that is shorter gets its slot at once."""
    requests = [
        (edges, prompt_of(9 - count), params("sampled", max_tokens=5)) for count, edges in enumerate((WIDE, NARROW))
    ]
    expected = expected_of(pair, requests)
    with late_runtime(pair, speculation(pair, depth), monkeypatch, max_batch=1) as (runtime, check):
        for num_steps in (1, 2, 4):
            names = [submit(runtime, *each) for each in requests]
            found = run_all(runtime)
            assert [found[name] for name in names] == expected
            cancelled = submit(runtime, WIDE, prompt_of(19), params("sampled"))
            for _ in range(num_steps):
                runtime.step()
            runtime.cancel(cancelled)
        check()


@pytest.mark.second
def test_a_late_rank_verifies_what_the_first_does_for_a_request_that_is_given_up(
    pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has taken what the grammar forces when it is cancelled, the other not yet."""
    forcing = {state: {token: (state + 1) % 7} for state, token in enumerate((5, 9, 33, 64, 2, 2, 96))}
    with late_runtime(pair, speculation(pair, 3), monkeypatch, max_batch=2) as (runtime, check):
        beside = runtime.submit(prompt_of(7), params("sampled", max_tokens=60))
        for num_steps in (1, 2, 4):
            cancelled = submit(runtime, forcing, prompt_of(9), params("sampled", max_tokens=40))
            for _ in range(num_steps):
                runtime.step()
            runtime.cancel(cancelled)
            runtime.step()
            check()
        assert len(run_all(runtime)[beside]) > 0
        check()
