"""Wide steps: the tokens and bits of a plain run, however and when they are entered; and texts that requests name."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import load_fake
from recording import Trace, assert_same, check_invariants, prompt_of, run_all, run_one, traced
from stages import later, wide
from tiny_grammars import Automaton, random_edges, submit_with
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.sessions.book import SessionKey, SessionRecord
from lowlat.errors import ConfigError, RequestError
from lowlat.graphs import Bucket
from lowlat.step.ladder import StepLadder
from lowlat.step.variants import PROPOSED

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 192, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}
METHODS: dict[str, dict[str, Any]] = {"suffix": {"method": "suffix"}, "beside": {"text_drafts": "suffix"}}
# all of these repeat themselves before long; the last draws, and its penalties reward what was there
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.1, "logit_bias": {5: 0.5}},
    "penalised": {"temperature": 0.5, "presence_penalty": -2.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
}
REPEATING = prompt_of(23) * 2


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    families = ("llama", "gpt_oss", "qwen3_5_moe_text")
    return {family: make_pair(tmp_path_factory.mktemp(family), family) for family in families}


def speculation(pair: PairPaths, method: str, depth: int = 3, **others: Any) -> SpeculativeConfig:
    own = {"wide_rows": 32, **METHODS[method], **others}
    model: dict[str, Any] = {} if "method" in own else {"model": pair.head}
    return SpeculativeConfig(num_speculative_tokens=depth, strict=True, **model, **own)


def load(pair: PairPaths, method: str, *, options: dict[str, Any] | None = None, **others: Any) -> Runtime:
    config = speculation(pair, method, **others)
    return Runtime.load(pair.target, config, device="cpu", **{**OPTIONS, **(options or {})})


def params(mode: str = "greedy", max_tokens: int = 84, seed: int = 3, **others: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": max_tokens, **MODES[mode], **others})


PLAIN: dict[str, Trace] = {}


def plain(pair: PairPaths, prompt: list[int], sampling: SamplingParams) -> Trace:
    key = f"{pair.target} {prompt} {sampling}"
    if key not in PLAIN:
        with Runtime.load(pair.target, device="cpu", **{**OPTIONS, "prefix_reuse": False}) as runtime:
            PLAIN[key] = traced(runtime, prompt, sampling)
    return PLAIN[key]


def num_wide(runtime: Runtime) -> int:
    found: int = runtime.summary().get("wide_verification", {}).get("steps", 0)
    return found


@pytest.mark.parametrize(
    ("family", "method", "rows", "mode"),
    [
        ("llama", "beside", 32, "greedy"),
        later("llama", "suffix", 16, "sampled"),
        wide("gpt_oss", "suffix", 32, "greedy"),
        later("gpt_oss", "beside", 16, "penalised"),
        ("qwen3_5_moe_text", "suffix", 32, "greedy"),
    ],
)
def test_wide_steps_change_nothing(family: str, method: str, rows: int, mode: str, pairs: dict[str, PairPaths]) -> None:
    sampling = params(mode, max_tokens=100)
    expected = plain(pairs[family], REPEATING, sampling)
    with load(pairs[family], method, wide_rows=rows) as runtime:
        found = traced(runtime, REPEATING, sampling)
        report = runtime.summary()["wide_verification"]
    assert_same(found, expected)
    assert report["steps"] > 2 and report["tokens"] > 6 * report["steps"]


def test_the_draft_model_goes_on_as_if_there_had_been_no_wide_steps(pairs: dict[str, PairPaths]) -> None:
    """It sees what they commit: its keys and values have the bits that steps of the usual length give them."""
    caches = []
    for rows in (0, 32):
        with load(pairs["llama"], "beside", wide_rows=rows, options={"prefix_reuse": False}) as runtime:
            name = runtime.submit(REPEATING, params(max_tokens=110))
            tokens: list[int] = []
            while len(tokens) < 50:
                tokens += [token for output in runtime.step() for token in output.token_ids]
            table = runtime.executor.state["block_table"][0].long()
            length = len(REPEATING) + 45
            cache = runtime.executor.state["draft_model.k_cache"][table].transpose(1, 2).flatten(0, 1)
            caches.append(cache[1:length].clone())
            assert bool(num_wide(runtime)) == bool(rows)
            runtime.cancel(name)
            run_all(runtime)
    assert torch.equal(*caches) and caches[0].any()


@pytest.mark.parametrize(
    ("method", "looping"), [("suffix", True), later("beside", False), wide("suffix", False), wide("beside", True)]
)
def test_queued_and_looping_steps_give_the_same_tokens(method: str, looping: bool, pairs: dict[str, PairPaths]) -> None:
    """Wide steps are never launched ahead, and no loop runs them; what is around them runs ahead."""
    requests = [
        (REPEATING, params()),
        (prompt_of(9, seed=1), params("sampled")),
        (prompt_of(5, seed=2), params(seed=9)),
    ]
    expected = [plain(pairs["llama"], *request)[0] for request in requests]
    config = speculation(pairs["llama"], method)
    runtime, device = load_fake(
        pairs["llama"].target, config, device_loop=looping, seed=1, lead=3, **OPTIONS, prefix_reuse=False
    )
    with closing(runtime):
        names = [runtime.submit(*request) for request in requests]
        found = run_all(runtime)
        assert [found[name] for name in names] == expected
        wide = [number for number, entry in enumerate(device.log) if entry[0] == "step" and is_wide(entry[1])]
        assert len(wide) == num_wide(runtime) > 0
        assert not any(entry[0] == "loop" and is_wide(entry[1]) for entry in device.log)
        for number in wide:  # it is the only one under way
            ran = [entry[0] for entry in device.log[number + 1 :] if entry[0] in ("ran", "step", "loop", "prefill")]
            assert ran[0] == "ran"
        assert device.count("loop" if looping else "step") > 0


def is_wide(bucket: Bucket) -> bool:
    return bucket.variant == PROPOSED


def test_neighbours_moves_and_grammars(pairs: dict[str, PairPaths]) -> None:
    """Next to requests that join, end, have a grammar, are paused amid a copy, or want few drafts."""
    pair, edges = pairs["llama"], random_edges(3, 97, num_states=5, most=60, forced=0.2)
    others = [
        (prompt_of(11, seed=4), params("sampled", 30)),
        (REPEATING[:30], params(max_tokens=40, max_draft_tokens=2)),
    ]
    expected = [plain(pair, *each)[0] for each in [(REPEATING, params()), *others]]
    with load(pair, "suffix", wide_rows=0) as runtime:
        bound = run_bound(runtime, edges)
    with load(pair, "suffix") as runtime:
        first = runtime.submit(REPEATING, params())
        tokens: dict[str, list[int]] = {first: []}
        names = [first]
        for number in range(400):
            if not runtime.busy and number > 12:
                break
            if number == 6:
                runtime.pause(first)
            if number in (8, 10):
                names.append(runtime.submit(*others[number // 2 - 4]))
            if number == 9:
                runtime.resume(first)
            for output in runtime.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        assert [tokens[name] for name in names] == expected
        assert num_wide(runtime) > 0
        check_invariants(runtime)
        assert run_bound(runtime, edges) == bound


def run_bound(runtime: Runtime, edges: Any) -> list[int]:
    name = submit_with(runtime, Automaton(edges), prompt_of(8), params(max_tokens=40))
    free = runtime.submit(REPEATING, params())
    found = run_all(runtime)
    assert len(found[free]) == 84
    return found[name]


def test_checked_steps_hold(pairs: dict[str, PairPaths]) -> None:
    with load(pairs["llama"], "beside", options={"check": "masks,spans,lengths"}) as runtime:
        assert run_one(runtime, REPEATING, params()) == plain(pairs["llama"], REPEATING, params())[0]
        assert num_wide(runtime) > 0 and not runtime.summary()["checks"].get("failures")


def test_nothing_is_wide_where_nothing_is_copied(pairs: dict[str, PairPaths]) -> None:
    """Buckets of the usual steps have the operations that they have without wide ones."""
    sampling = SamplingParams(temperature=1.5, seed=2, max_tokens=40)
    with load(pairs["llama"], "beside") as runtime, load(pairs["llama"], "beside", wide_rows=0) as usual:
        assert run_one(runtime, prompt_of(20), sampling) == run_one(usual, prompt_of(20), sampling)
        assert "wide_verification" not in runtime.summary()
        for bucket in usual.ladder.programs:
            kinds = [[op.kind for op in each.executor.program(bucket).ops] for each in (runtime, usual)]
            assert kinds[0] == kinds[1]


def test_who_has_ended_makes_no_step_of_others_wide(pairs: dict[str, PairPaths]) -> None:
    with load(pairs["llama"], "beside") as runtime:
        copying = runtime.submit(REPEATING, params())
        runtime.submit(prompt_of(20), SamplingParams(temperature=1.5, seed=2, max_tokens=60))
        while not num_wide(runtime):
            runtime.step()
        runtime.cancel(copying)
        most = num_wide(runtime) + 1  # one may be under way
        run_all(runtime)
        assert num_wide(runtime) <= most


def test_named_texts_are_copied_from_the_first(pairs: dict[str, PairPaths]) -> None:
    """The text that the answer will be: after a few tokens its steps are wide, with the tokens that it has without."""
    prompt, sampling = prompt_of(20, seed=8), SamplingParams(temperature=0.9, seed=5, max_tokens=90)
    expected, _ = plain(pairs["llama"], prompt, sampling)
    steps = []
    with load(pairs["llama"], "beside", draft_text_tokens=120) as runtime:
        for texts in ((), (tuple(expected),), ((1, 2, 3), tuple(expected)), (tuple(expected[:50]),)):
            name = runtime.submit(prompt, replace(sampling, draft_texts=texts))
            assert run_all(runtime)[name] == expected
            steps.append(runtime.metrics(name).num_steps)
        assert num_wide(runtime) > 3
    assert 2 * steps[1] < steps[0] and steps[1] == steps[2] < steps[3] < steps[0]


def test_a_sessions_earlier_answers_are_named_texts(pairs: dict[str, PairPaths], tmp_path: Path) -> None:
    """Of prompts that come at once, of open ones, and of a session from a file, in which its whole text is."""
    prompt, sampling = prompt_of(20, seed=8), SamplingParams(temperature=0.9, seed=5, max_tokens=60)
    with load(pairs["llama"], "beside", draft_text_tokens=90) as runtime:
        names = [runtime.submit(prompt, sampling, session="one")]
        first = run_all(runtime)[names[0]]
        opened = runtime.open_prompt(sampling, session="one")  # finished on trial, and then it goes on
        opened.append(prompt[:9])
        opened.finish(speculative=True)
        runtime.step()
        opened.append(prompt[9:])
        opened.finish()
        fresh = runtime.open_prompt(sampling, session="other")
        fresh.append(prompt)
        fresh.finish()
        names += [opened.request_id, runtime.submit(prompt, sampling, session="one"), fresh.request_id]
        tokens = run_all(runtime)
        assert [tokens[name] for name in names[1:]] == [first] * 3
        steps = [runtime.metrics(name).num_steps for name in names]
        assert 2 * max(steps[1:3]) < min(steps[0], steps[3])
        runtime.session("one").save(tmp_path / "one.session")
        runtime.session("one").close()
        runtime.load_session(tmp_path / "one.session")
        name = runtime.submit([9, *prompt], sampling, session="one")
        assert runtime._requests[name].draft_texts == (*prompt, *first, -1)
        runtime.cancel(name)


def test_answers_that_a_prompt_holds_are_left_out() -> None:
    record = SessionRecord(SessionKey("", "one"), 1.0)
    record.answers = ((3, 4), (5,), (), (1 << 24, 0), (7, 8))
    assert record.answers_beside((1, 3, 4, 5)) == ((1 << 24, 0), (7, 8))
    assert record.answers_beside((3, 5, 4, 1, 0, 0, 7, 8)) == ((3, 4), (1 << 24, 0))  # 1, 0: its bytes, displaced


@pytest.mark.parametrize(
    ("capacity", "texts", "message"),
    [
        (0, ((1, 2),), "draft_texts: this runtime drafts from no texts .* draft_text_tokens"),
        (8, ((1, 2, 3, 4), (5, 6, 7)), r"draft_texts of 9 tokens, .* exceed 8 \(draft_text_tokens\)"),
        (8, ((97,),), "draft_texts: 97 is not a token id; the vocabulary has 97"),
        (8, ("a text",), "draft_texts need tokenizer.json"),
    ],
)
def test_named_texts_that_are_refused(
    capacity: int, texts: tuple[Any, ...], message: str, pairs: dict[str, PairPaths]
) -> None:
    with (
        load(pairs["llama"], "suffix", wide_rows=0, draft_text_tokens=capacity) as runtime,
        pytest.raises(RequestError, match=message),
    ):
        runtime.submit([1, 2], SamplingParams(draft_texts=texts))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wide_rows": 24}, "wide_rows must be 0, 16 or 32, got 24"),
        ({"draft_text_tokens": 1}, "draft_text_tokens must be 0, or 2 or more, .* got 1"),
        ({"wide_rows": 16, "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"wide_rows": 16, "adaptive_width": True}, "wide_rows 16 is not implemented for adaptive_width"),
        ({"wide_rows": 16, "enable_specpv": True}, "wide_rows 16 is not implemented for enable_specpv"),
        ({"wide_rows": 16, "simulated_acceptance": 0.5}, "wide_rows 16 is not implemented for simulated_acceptance"),
        ({"wide_rows": 16, "method": "ngram"}, "wide_rows is an option of method 'suffix', and method is 'ngram'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**{"method": "suffix", **options})


def test_what_is_not_counted(pairs: dict[str, PairPaths]) -> None:
    with pytest.raises(ConfigError, match=r"count_tiles counts .*, and wide_rows"):
        load(pairs["llama"], "suffix", options={"count_tiles": True})


def test_wide_buckets_have_64_rows_at_most() -> None:
    ladder = StepLadder([1, 2, 4, 8], {0: 1, 3: 4}, proposed=(16, 32))
    assert [(each.batch, each.rows) for each in ladder.wide_buckets] == [(2, 32), (1, 32), (4, 16), (2, 16), (1, 16)]
    chosen = [ladder.choose_proposed(active, most) for active, most in ((1, 99), (1, 31), (3, 99), (5, 99), (1, 15))]
    assert [each and (each.batch, each.rows) for each in chosen] == [(1, 32), (1, 16), (4, 16), None, None]
