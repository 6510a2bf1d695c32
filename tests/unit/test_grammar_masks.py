"""Requests under a grammar: the same seed gives the same tokens however they run, and the grammar allows each of them.

The grammars are automata over token ids; what text they come from is another's business.
"""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import load_fake
from recording import prompt_of, run_all
from sampling_cases import World
from stages import later, wide
from tiny_grammars import Automaton, Breaking, Edges, accepts, random_edges, submit_with
from tiny_models import PairPaths, make_pair
from unit.kernels.test_sample_distribution import ROWS, VOCABULARY, p_value
from unit.test_lossless import MAX_TOKENS, OPTIONS, TREES, load, params

import lowlat
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import DeviceError

# Wide: many tokens at each state, of which drafts are accepted; narrow: few, and often one alone.
WIDE, NARROW = random_edges(3, 97, num_states=5, most=70, forced=0.0), random_edges(1, 97)
ON_DEVICE = {name: value for name, value in OPTIONS.items() if name != "device"}
GRAMMARS = {"wide": WIDE, "narrow": NARROW}
FORKS: Edges = {0: {4: 1, 9: 1}, 1: {33: 2}, 2: {64: 3, 96: 3}, 3: {}}  # three tokens, then the end


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target and its draft model."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


def decode(runtime: Runtime, edges: Edges, sampling: SamplingParams, depth: Any = None, seed: int = 0) -> list[int]:
    """A request's tokens, alone, of which the grammar was told each."""
    automaton = Automaton(edges)
    name = submit_with(runtime, automaton, prompt_of(19, seed=seed), sampling)
    tokens = run_all(runtime, depth)[name]
    assert automaton.taken == tokens[: len(automaton.taken)] and len(tokens) == sampling.max_tokens
    return tokens


def expected_tokens(pair: PairPaths, edges: Edges, sampling: SamplingParams) -> list[int]:
    """Those of plain decoding, all of which the grammar allows."""
    with Runtime.load(pair.target, **OPTIONS) as runtime:
        tokens = decode(runtime, edges, sampling)
    assert accepts(edges, tokens)
    return tokens


@pytest.mark.parametrize(
    ("grammar", "mode", "method", "tree"),
    [
        later("wide", "greedy", "eagle3+", None),
        ("wide", "sampled", "eagle3", "bushy"),
        ("narrow", "penalised", "suffix", None),
        wide("wide", "filtered", "eagle3", "deep"),
    ],
)
def test_no_speculation_changes_anything(
    grammar: str, mode: str, method: str, tree: str | None, pair: PairPaths
) -> None:
    edges, sampling = GRAMMARS[grammar], params(mode)
    expected = expected_tokens(pair, edges, sampling)
    depth = max(map(len, TREES[tree])) if tree else 7
    with load(pair, depth, tree=TREES[tree] if tree else None, method=method) as runtime:
        for asked in (depth, 0) if tree else (None, 3):
            assert decode(runtime, edges, sampling, asked) == expected
        changing = random.Random(2).choices([0, depth] if tree else range(8), k=99)
        assert decode(runtime, edges, sampling, changing.__getitem__) == expected
        assert runtime.summary()["eagle_speculation"]["total_draft_tokens"] > 0


@pytest.mark.parametrize("tree", ["bushy"])
def test_what_is_forced_costs_no_step_of_its_own(tree: str | None, pair: PairPaths) -> None:
    """Runs of forced tokens are accepted as drafts, as many as are verified at once; limits hold, too."""
    edges = {state: {token: (state + 1) % 8} for state, token in enumerate((5, 9, 33, 64, 2, 2, 96))}
    edges[7] = dict.fromkeys(range(40), 0)
    with load(pair, 3, tree=TREES[tree] if tree else None) as runtime:
        for limit, most in ((None, 14), (1, 24), (0, 32)):
            name = submit_with(
                runtime, Automaton(edges), prompt_of(9), params("sampled", 1, 33, max_draft_tokens=limit)
            )
            assert len(run_all(runtime)[name]) == 33
            assert runtime.metrics(name).num_steps <= most, limit
        figures = runtime.summary()["structured_output"]
    assert figures["num_requests"] == 3 and 0 < figures["mask_s"] <= figures["max_mask_s"] * figures["num_mask_steps"]
    assert figures["num_forced_accepted"] >= 24 and figures["num_accepted_tokens"] >= figures["num_forced_accepted"]


def test_drafts_are_accepted_under_a_grammar(pair: PairPaths) -> None:
    """Else the masks of deeper rows would not have been looked at."""
    accepted = 0
    for tree in (None, "bushy"):
        with load(pair, 3, tree=TREES[tree] if tree else None) as runtime:
            decode(runtime, WIDE, params("greedy", max_tokens=40))
            accepted += runtime.summary()["eagle_speculation"]["total_accepted_tokens"]
    assert accepted > 5


@pytest.mark.second
@pytest.mark.parametrize(("depth", "tree"), [(3, "bushy")])
def test_neighbours_change_nothing(depth: int, tree: str | None, pair: PairPaths) -> None:
    """Some with a grammar, some without; they come, end, and are cancelled at any time."""
    source, sampling = random.Random(depth), params("sampled", max_tokens=18)
    with Runtime.load(pair.target, **OPTIONS) as runtime:
        plain = runtime.submit(prompt_of(19), sampling)
        expected = [run_all(runtime)[plain], *(decode(runtime, edges, sampling) for edges in (WIDE, NARROW))]
    with load(pair, depth, tree=TREES[tree] if tree else None, max_queue=16) as runtime:
        names: list[str] = []
        others: list[str] = []
        tokens: dict[str, list[int]] = {}
        for number in range(400):
            if number % 7 == 3 and len(names) < 3:
                edges = (None, WIDE, NARROW)[len(names)]
                if edges is None:
                    names.append(runtime.submit(prompt_of(19), sampling))
                else:
                    names.append(submit_with(runtime, Automaton(edges), prompt_of(19), sampling))
            elif source.random() < 0.3 and runtime.scheduler.num_queued < 3:
                own = params("sampled", seed=number, max_tokens=source.randrange(1, 12))
                prompt = prompt_of(source.randrange(1, 30), seed=number)
                guided = source.random() < 0.5
                others.append(
                    submit_with(runtime, Automaton(NARROW), prompt, own) if guided else runtime.submit(prompt, own)
                )
            elif source.random() < 0.1 and others and others[0] in runtime._requests:
                runtime.cancel(others.pop(0))
            for output in runtime.step(source.choice([None, 0])):
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if len(names) == 3 and not set(names) & runtime._requests.keys():
                break
        run_all(runtime)
    assert [tokens[name] for name in names] == expected


@pytest.mark.parametrize(("depth", "device_loop", "lead"), [(0, True, 3), (3, False, 0), wide(3, True, 9)])
def test_draws_wait_for_the_host_and_nothing_else_does(
    depth: int, device_loop: bool, lead: int, pair: PairPaths
) -> None:
    """While nobody joins or leaves, a step stands after the one that runs; nothing loops while there is a grammar."""
    sampling = params("sampled", max_tokens=20)
    expected = expected_tokens(pair, WIDE, sampling)
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=3)
    runtime, device = load_fake(pair.target, speculative, device_loop=device_loop, seed=depth, lead=lead, **ON_DEVICE)
    with closing(runtime):
        runtime.speculate(depth)
        before = runtime.submit(prompt_of(5), params("greedy", max_tokens=9))
        found = {before: [token for _ in range(3) for output in runtime.step() for token in output.token_ids]}
        num_loops, head = device.count("loop"), device.head
        name = submit_with(runtime, Automaton(WIDE), prompt_of(19), sampling)
        after = submit_with(runtime, Automaton(NARROW), prompt_of(4), params("sampled", max_tokens=50))
        while name in runtime._requests:
            for output in runtime.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        assert found[name] == expected
        assert num_loops == device.count("loop") and sum(entry > head for entry in device.last_ones) <= 4 < device.head
        runtime.cancel(after)
        run_all(runtime)
        device.log.clear()
        last = runtime.submit(prompt_of(6), params("greedy", max_tokens=20))
        assert len(run_all(runtime)[last]) == 20
        assert bool(device.count("loop")) == device_loop


def test_a_stop_string_frees_a_draw_that_nobody_wants() -> None:
    """The host finds it after the launch of the next step, which waits for the masks of a request that has ended."""
    target = Path(lowlat.__file__).parent / "demo" / "target"
    runtime, device = load_fake(target, None, device_loop=False, max_batch=2, max_context=96)
    everything = {0: dict.fromkeys(range(runtime.model_config.vocab_size), 0)}
    with closing(runtime):
        sampling = SamplingParams(max_tokens=40, temperature=0.0)
        plain = runtime.submit([300, 301, 302], sampling)
        tokens = run_all(runtime)[plain]
        assert runtime.codec is not None
        stopping = replace(sampling, stop=(runtime.codec.decode(tokens[3:5]),))
        name = submit_with(runtime, Automaton(everything), [300, 301, 302], stopping)
        assert run_all(runtime)[name] == tokens[:5]
        device.synchronize()
        assert device.idle and not runtime.busy


def test_blocks_of_a_failed_request_are_cleared_behind_the_masks_of_others(pair: PairPaths) -> None:
    """The next step is under way when a request turns out to have failed, and clearing waits for that step."""
    runtime, device = load_fake(pair.target, None, device_loop=False, **ON_DEVICE)
    with closing(runtime):
        good = submit_with(runtime, Automaton(WIDE), prompt_of(19), params("sampled", max_tokens=30))
        bad = runtime.submit(prompt_of(9, seed=1), params("greedy", max_tokens=60))
        outputs = [output for _ in range(9) for output in runtime.step()]
        device.state["v_cache.0"][runtime._requests[bad].table[0]] = torch.nan
        while runtime.busy:
            outputs.extend(runtime.step())
        assert {o.request_id: o.finish_reason for o in outputs if o.finish_reason} == {good: "length", bad: "error"}
        tokens = [token for output in outputs if output.request_id == good for token in output.token_ids]
        assert len(tokens) == 30 and accepts(WIDE, tokens)
        assert device.count("clear") == 1 and runtime.kvcache.stats().num_to_clear == 0


def test_draws_are_renormalised_over_what_is_allowed() -> None:
    """A forbidden token is never drawn; the others are as likely as their shares say, and biased ones as biased."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 1.5
    allowed = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(6)) < 0.3
    world, counts = World(VOCABULARY, 1), torch.zeros(VOCABULARY, dtype=torch.int64)
    bias = {int(logits.argmax()): 50.0} if not allowed[logits.argmax()] else {int((~allowed).nonzero()[0]): 50.0}
    world.bias(0, bias)
    for start in range(0, 1_000, ROWS):
        world.set(0, seed=start % (5 * ROWS) + 1, length=start, temperature=1.2)
        world.mask(0, allowed.repeat(ROWS, 1))
        counts += torch.bincount(torch.tensor(world.draw(logits.repeat(ROWS, 1), [0])[0]), minlength=VOCABULARY)
    probabilities = torch.softmax(torch.where(allowed, logits / 1.2, -torch.inf).double(), 0)
    assert int(counts[~allowed].sum()) == 0 and int(counts.sum()) >= 1_000
    assert p_value(counts, probabilities) > 1e-3


def test_a_draw_never_runs_ahead_of_its_masks() -> None:
    world = World(40, 1)
    world.set(0, has_grammar=1)
    world.grammar_ready[0] = world.lengths[0] - 1
    with pytest.raises(DeviceError, match="draws after 10 tokens, and its masks are those after 9"):
        world.draw(torch.zeros(1, 40), [0])


def finishing(edges: Edges, end_ids: tuple[int, ...], **options: Any) -> tuple[Automaton, SamplingParams]:
    return Automaton(edges, end_ids), SamplingParams(max_tokens=30, temperature=1.0, seed=3, **options)


@pytest.mark.parametrize(
    ("edges", "end_ids", "options", "num_tokens", "reason", "error"),
    [
        (FORKS, (5,), {"stop_token_ids": (5,)}, 4, "stop", None),
        (FORKS, (), {}, 3, "stop", None),  # complete, and nothing ends it but that
        (FORKS, (5,), {"stop_token_ids": (5,), "min_tokens": 9}, 3, "stop", None),
        ({0: {4: 1}, 1: {5: 2}}, (5,), {"stop_token_ids": (5,), "min_tokens": 9}, 1, "error", "min_tokens 9 forbids"),
    ],
    ids=["end id", "no end id", "complete before min_tokens", "an end id that min_tokens forbids"],
)
@pytest.mark.parametrize("depth", [3])
def test_ends(
    depth: int,
    edges: Edges,
    end_ids: tuple[int, ...],
    options: dict[str, Any],
    num_tokens: int,
    reason: str,
    error: str | None,
    pair: PairPaths,
) -> None:
    with load(pair, 3) as runtime:
        automaton, sampling = finishing(edges, end_ids, **options)
        name = submit_with(runtime, automaton, prompt_of(9), sampling)
        outputs = [output for _ in range(20) for output in runtime.step(depth) if output.request_id == name]
        assert sum(len(output.token_ids) for output in outputs) == num_tokens
        assert outputs[-1].finish_reason == reason and not runtime.busy
        assert (error or "None") in str(outputs[-1].error)


class Dead(Automaton):
    """An automaton whose states without edges are no ends: nothing may follow them."""

    @property
    def terminated(self) -> bool:
        return False


class Interrupted(Automaton):
    """An automaton that is interrupted in its fifth call of `fill`, as by Ctrl-C."""

    def fill(self, tokens: Any, parents: Any, masks: Any) -> None:
        super().fill(tokens, parents, masks)
        if len(self.asked) == 5:
            raise KeyboardInterrupt


def test_masks_that_an_interrupt_held_back_are_filled_by_the_next_step(pair: PairPaths) -> None:
    """The device's draw waits for them; no token is lost to the request."""
    sampling = params("sampled", max_tokens=12)
    expected = expected_tokens(pair, WIDE, sampling)
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=3)
    runtime, _ = load_fake(pair.target, speculative, device_loop=False, **ON_DEVICE)
    with closing(runtime):
        request = runtime._requests[submit_with(runtime, Interrupted(WIDE), prompt_of(19), sampling)]
        with pytest.raises(KeyboardInterrupt):
            run_all(runtime)
        run_all(runtime)
        assert request.committed[19:] == expected


@pytest.mark.parametrize("depth", [wide(0), 3])
def test_a_grammar_that_fails_ends_its_request_alone(depth: int, pair: PairPaths) -> None:
    """At once or later, where nothing may follow, or where its masks cannot be had."""
    sampling = params("sampled")
    failing: list[tuple[Automaton, int, str]] = [
        (Dead({0: {}}), 0, "the grammar allows no token at position 9"),
        (Dead({**FORKS}), 3, "the grammar allows no token at position 12"),
        (Breaking(WIDE, 0), 0, "call 0 fails"),
        (Breaking(WIDE, 2), 2, "call 2 fails"),
    ]
    with load(pair, 3, max_batch=2) as runtime:
        alone = runtime.submit(prompt_of(19), sampling)
        expected = run_all(runtime, depth)[alone]
        for grammar, num_tokens, error in failing:
            neighbour = runtime.submit(prompt_of(19), sampling)
            name = submit_with(runtime, grammar, prompt_of(9), sampling)
            outputs = [output for _ in range(60) for output in runtime.step(depth)]
            assert not runtime.busy and runtime.kvcache.stats().num_used == 0
            assert [t for output in outputs if output.request_id == neighbour for t in output.token_ids] == expected
            own = [output for output in outputs if output.request_id == name]
            assert own[-1].finish_reason == "error" and error in str(own[-1].error)
            assert sum(len(output.token_ids) for output in own) >= num_tokens
        assert decode(runtime, WIDE, sampling) and len(expected) == MAX_TOKENS


def test_a_forbidden_commit_is_an_error(pair: PairPaths) -> None:
    """Whatever committed it: imposed acceptance takes drafts that the grammar forbids."""
    imposed = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, simulated_accept_length=4.0)
    with Runtime.load(pair.target, imposed, **OPTIONS) as runtime:
        name = submit_with(runtime, Automaton(NARROW), prompt_of(19), params("greedy"))
        outputs = [output for _ in range(20) for output in runtime.step() if output.request_id == name]
    assert outputs[-1].finish_reason == "error" and "the grammar forbids token" in str(outputs[-1].error)
