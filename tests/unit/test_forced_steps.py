"""Wide steps that verify a long forced text: tokens and bits of plain steps, with any method of drafting or none."""

from contextlib import closing
from typing import Any

import pytest
from fake_device import load_fake
from recording import Recorder, Trace, assert_same, check_invariants, prompt_of, run_all
from stages import later, wide
from tiny_dflash import dflash_draft_model
from tiny_grammars import Automaton, Edges, documents, random_edges
from tiny_models import PairPaths, copying_draft_model, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.drafting.forced_steps import PATIENCE
from lowlat.errors import ConfigError
from lowlat.step.ladder import StepLadder
from lowlat.step.variants import PROPOSED, WIDE

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 192, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}
TREE = ((0,), (1,), (0, 0), (0, 1))
LEAVES = [[i] for i in range(15)] + [[i, j] for i in range(4) for j in range(12)]
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "eagle3": {},
    "tree": {"tree": TREE},
    "dynamic": {"dynamic_tree_max_topk": 2, "max_total_draft_tokens": 6},
    "suffix": {"method": "suffix"},
    "copies": {"method": "suffix", "wide_rows": 32},
    "beside": {"text_drafts": "suffix", "wide_rows": 16},
    "dflash": {"method": "dflash"},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "logprobs": 2},
    "penalised": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
}


JSON = documents(9, 1, 34, 14, 0, 5)
SELDOM = random_edges(3, 97, num_states=5, most=60, forced=0.1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    found, folder = {}, tmp_path_factory.mktemp("pairs")
    for family in ("llama", "qwen3_5_moe_text"):
        model = make_target(folder / family, family, gain=0.45)
        found[family] = PairPaths(folder / family, folder / f"{family} draft")
        if family == "llama":
            copying_draft_model(found[family].head, model, draft_vocab_size=80)
            dflash_draft_model(folder / "dflash", model)
    return found


def speculation(pair: PairPaths, method: str, **others: Any) -> SpeculativeConfig | None:
    own = METHODS[method]
    if own is None:
        return None
    model: dict[str, Any] = {} if own.get("method") == "suffix" else {"model": pair.head}
    if method == "dflash":
        model = {"model": pair.head.parent / "dflash"}
    return SpeculativeConfig(**{"num_speculative_tokens": 2 if method == "tree" else 3, "strict": True, **model, **own})


def load(pair: PairPaths, method: str, rows: int = 32, **options: Any) -> Runtime:
    config = speculation(pair, method)
    return Runtime.load(pair.target, config, device="cpu", **{**OPTIONS, "forced_rows": rows, **options})


def params(mode: str = "greedy", max_tokens: int = 75, **others: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": max_tokens, "ignore_eos": True, **MODES[mode], **others})


def run(runtime: Runtime, mode: str, edges: Edges = JSON, **others: Any) -> Trace:
    recorder = Recorder(runtime)
    name = recorder.submit(prompt_of(13), params(mode, **others))
    runtime._requests[name].grammar = Automaton(edges)
    tokens = run_all(runtime)[name]
    recorder.stop()
    return tokens, recorder.logits[name]


PLAIN: dict[str, Trace] = {}


def plain(pair: PairPaths, mode: str) -> Trace:
    key = f"{pair.target} {mode}"
    if key not in PLAIN:
        with Runtime.load(pair.target, device="cpu", **OPTIONS, prefix_reuse=False) as runtime:
            PLAIN[key] = run(runtime, mode)
    return PLAIN[key]


def forced(runtime: Runtime) -> dict[str, int]:
    found: dict[str, int] = runtime.summary().get("forced_verification", {"steps": 0, "tokens": 0})
    return found


@pytest.mark.parametrize(
    ("family", "method", "rows", "mode"),
    [
        ("llama", "none", 32, "greedy"),
        ("llama", "eagle3", 32, "sampled"),
        ("llama", "copies", 0, "penalised"),
        later("llama", "tree", 16, "sampled"),
        wide("llama", "dynamic", 32, "penalised"),
        wide("llama", "dflash", 32, "penalised"),
        later("llama", "beside", 32, "greedy"),
        ("qwen3_5_moe_text", "none", 16, "sampled"),
        wide("qwen3_5_moe_text", "suffix", 32, "greedy"),
    ],
)
def test_wide_steps_change_nothing(family: str, method: str, rows: int, mode: str, pairs: dict[str, PairPaths]) -> None:
    """A text of 34 tokens takes two steps, or three, and one of 9 takes one."""
    expected = plain(pairs[family], mode)
    with load(pairs[family], method, rows) as runtime:
        found = run(runtime, mode)
        report = forced(runtime)
        check_invariants(runtime)
    assert_same(found, expected)
    assert report["steps"] >= 3 and report["tokens"] >= 8 * report["steps"]


def test_they_are_few_where_a_text_is_long(pairs: dict[str, PairPaths]) -> None:
    """The steps of one request, by its rows and its own limit of drafts; and steps asked for without drafts have one
    row each."""
    counts = []
    for rows, limits in ((0, (None,)), (16, (None,)), (32, (None, 9, 0))):
        with load(pairs["llama"], "eagle3", rows) as runtime:
            for limit in limits:
                before = forced(runtime)["steps"]
                name = runtime.submit(prompt_of(13), params(max_draft_tokens=limit))
                runtime._requests[name].grammar = Automaton(JSON)
                run_all(runtime)
                counts.append(runtime.metrics(name).num_steps)
                assert (forced(runtime)["steps"] > before) == (rows > 0 and limit != 0)
            if rows == 32:
                name = runtime.submit(prompt_of(13), params(max_tokens=20))
                runtime._requests[name].grammar = Automaton(JSON)
                run_all(runtime, 0)
                assert runtime.metrics(name).num_steps == 19
    assert counts[2] < counts[1] < counts[3] < counts[0] < counts[4] == 74
    assert counts[2] <= 16


@pytest.mark.parametrize(("method", "looping"), [("eagle3", True), wide("none", False), wide("copies", False)])
def test_queued_and_looping_steps_give_the_same_tokens(method: str, looping: bool, pairs: dict[str, PairPaths]) -> None:
    """Next to requests that have none, a seldom forcing one, or their own; wide steps are never launched ahead."""
    pair = pairs["llama"]
    kinds: list[Edges | None] = [JSON, None, SELDOM, JSON]
    expected: list[list[int]] = []
    for seed in (-1, 0):
        if seed < 0:
            runtime = Runtime.load(pair.target, device="cpu", **OPTIONS, prefix_reuse=False)
            device = None
        else:
            more = {**OPTIONS, "forced_rows": 32, "prefix_reuse": False}
            runtime, device = load_fake(
                pair.target, speculation(pair, method), device_loop=looping, seed=seed, lead=3, **more
            )
        with closing(runtime):
            names = []
            for number, edges in enumerate(kinds):
                names.append(runtime.submit(prompt_of(9 + number, seed=number), params("sampled", 50 - 9 * number)))
                runtime._requests[names[-1]].grammar = None if edges is None else Automaton(edges)
            tokens = run_all(runtime)
            found = [tokens[name] for name in names]
            if device is None:
                expected = found
                continue
            assert found == expected
            launched = [n for n, entry in enumerate(device.log) if entry[0] == "step" and entry[1].variant == WIDE]
            assert forced(runtime)["steps"] > 0 and (launched or method == "copies")
            for number in launched:  # it is the only one under way
                ran = [entry[0] for entry in device.log[number + 1 :] if entry[0] in ("ran", "step", "loop", "prefill")]
                assert ran[0] == "ran"


def test_a_grammar_that_forces_little_lets_steps_run_ahead(pairs: dict[str, PairPaths]) -> None:
    """Again once its first steps have shown it."""
    pair, ahead = pairs["llama"], [0, 0]
    for number, rows in enumerate((0, 32)):
        config = speculation(pair, "eagle3")
        runtime, device = load_fake(pair.target, config, device_loop=False, **OPTIONS, forced_rows=rows)
        with closing(runtime):
            name = runtime.submit(prompt_of(9), params(max_tokens=60))
            runtime._requests[name].grammar = Automaton(random_edges(5, 97, num_states=5, most=60, forced=0.0))
            run_all(runtime)
            assert forced(runtime)["steps"] == 0
        running = 0
        for kind in (entry[0] for entry in device.log if entry[0] in ("step", "ran")):
            ahead[number] += kind == "step" and running > 0
            running += 1 if kind == "step" else -1
    assert ahead[0] - PATIENCE - 2 <= ahead[1] < ahead[0] and ahead[1] > 0


def test_paused_requests_and_those_with_neighbours_go_on(pairs: dict[str, PairPaths]) -> None:
    expected = plain(pairs["llama"], "sampled")[0]
    with load(pairs["llama"], "eagle3") as runtime:
        name = runtime.submit(prompt_of(13), params("sampled"))
        runtime._requests[name].grammar = Automaton(JSON)
        tokens: list[int] = []
        for number in range(300):
            if not runtime.busy:
                break
            if number == 3:
                runtime.pause(name)
                for other in range(3):
                    runtime.submit(prompt_of(5, seed=other), params(max_tokens=12))
            if number == 9:
                runtime.resume(name)
            tokens += [token for out in runtime.step() if out.request_id == name for token in out.token_ids]
        assert tokens == expected and forced(runtime)["steps"] > 2
        check_invariants(runtime)


def test_usual_steps_are_what_they_are_without(pairs: dict[str, PairPaths]) -> None:
    with load(pairs["llama"], "eagle3") as runtime, load(pairs["llama"], "eagle3", 0) as usual:
        assert {each.variant for each in runtime.ladder.wide_buckets} == {WIDE} and not usual.ladder.wide_buckets
        for bucket in usual.ladder.programs:
            kinds = [[op.kind for op in each.executor.program(bucket).ops] for each in (runtime, usual)]
            assert kinds[0] == kinds[1]
        name = runtime.submit(prompt_of(20), params(max_tokens=30))
        assert len(run_all(runtime)[name]) == 30 and "forced_verification" not in runtime.summary()


@pytest.mark.parametrize(
    ("options", "own", "message"),
    [
        ({"forced_rows": 24}, {}, "forced_rows must be 0, 16 or 32, got 24"),
        ({}, {"adaptive_width": True}, "forced_rows 32 is not implemented for adaptive_width"),
        ({}, {"simulated_acceptance": 0.5}, "forced_rows 32 is not implemented for simulated_acceptance"),
        ({}, {"enable_specpv": True}, "forced_rows 32 is not implemented for enable_specpv"),
        ({"count_tiles": True}, {}, "count_tiles counts .*, and forced_rows verifies more"),
        (
            {"max_batch": 8},
            {"tree": LEAVES, "num_speculative_tokens": 2},
            "forced_rows 32 next to a tree of 59 paths is for max_batch 5 at most, got 8",
        ),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], own: dict[str, Any], message: str, pairs: dict[str, PairPaths]
) -> None:
    config = SpeculativeConfig(model=pairs["llama"].head, **{"num_speculative_tokens": 3, "strict": True, **own})
    with pytest.raises(ConfigError, match=message):
        Runtime.load(pairs["llama"].target, config, device="cpu", **{**OPTIONS, "forced_rows": 32, **options})


def test_buckets_of_the_host_s_proposals() -> None:
    """64 rows of all slots at most, but where each slot must have them."""
    ladder = StepLadder([1, 2, 4, 8], {0: 1, 3: 4}, wide=((16, 32), 3), proposed=(16,))
    sizes = [(each.batch, each.rows, each.variant) for each in ladder.wide_buckets]
    assert sizes[:5] == [(batch, rows, WIDE) for batch, rows in ((2, 32), (1, 32), (4, 16), (2, 16), (1, 16))]
    assert {each.num_speculative_tokens for each in ladder.wide_buckets if each.variant == WIDE} == {3}
    assert [(each.batch, each.rows) for each in ladder.wide_steps(3, WIDE)] == [(4, 16)]
    assert not ladder.wide_steps(5, WIDE) and len(ladder.wide_steps(1, PROPOSED)) == 1
    with pytest.raises(ConfigError, match="no bucket verifies what the host proposes to 5 slots"):
        ladder.choose_wide(5)
    assert StepLadder([1, 8], {0: 1}, wide=((32,), 0), must_fit=True).choose_wide(5).batch == 8
