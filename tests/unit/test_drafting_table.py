"""Every method of drafting next to every other feature, pairwise: the tokens of a plain run, or a refusal by name."""

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from drafting_models import DraftingModels
from drafting_table import (
    ADAPTIVE,
    BESIDE,
    FACTORS,
    MODELS,
    RULES,
    SIMPLEST,
    TEXT,
    Case,
    allowed,
    covering,
    every_pair,
    named,
    pairs_of,
)
from fake_device import load_fake
from recording import check_invariants
from stages import later, wide
from tiny_grammars import Automaton, accepts, random_edges, submit_with

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.requests.open_prompts import OpenPrompt
from lowlat.errors import ConfigError, RequestError
from lowlat.executors.reference.ranks import RankedReferenceExecutor
from lowlat.options.request import StepOutput

FIRST, SECOND = 11, 50  # cases of the first stage, which hold most pairs, and of both, which hold nearly all
CASES = covering()
SLOTS = {"few": 3, "many": 9}
SIZES: dict[str, Any] = {"max_context": 96, "block_size": 4, "prefill_chunk": 8}
SPECPV: dict[str, Any] = {
    "enable_specpv": True,
    "specpv_block_size": 2,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 6,
    "specpv_n_window_blocks": 2,
    "specpv_n_spec_tokens_buf": 12,
    "specpv_partial_threshold": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "static": {"tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))},
    "dynamic": {"dynamic_tree_max_topk": 2, "max_total_draft_tokens": 6},
    "adaptive": {"adaptive_width": True},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"temperature": 0.9, "top_k": 30, "logprobs": 2},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.4, "logit_bias": {3: 1.5}},
}
EDGES = random_edges(3, 97, num_states=6, most=60, forced=0.3)
PROMPTS = ([*range(20, 27)] * 4 + [20, 21], [40, 41, 42] * 3, [50, 51])  # all decode at once; the last is disturbed
MAX_TOKENS = 9
Answer = tuple[list[int], list[Any]]  # tokens, and their logprobs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> DraftingModels:
    return DraftingModels(tmp_path_factory.mktemp("drafting"))


def runtime_options(case: Case) -> dict[str, Any]:
    """The options of a runtime for a case."""
    rounded = case["weights"] in ("fp8", "int4")
    return {
        **SIZES,
        "max_batch": SLOTS[case["slots"]],
        "dtype": "float32" if case["weights"] == "float32" else "bfloat16",
        "quantize": case["weights"] if rounded else None,
        "kv_cache_dtype": "fp8" if case["cache"] == "fp8" else "auto",
        "tensor_parallel_size": int(case["ranks"]),
        "tp_invariant": case["ranks"] == "2",
        "forced_rows": 16 if case["rows"] == "forced" else 0,
    }


def speculation(case: Case, models: DraftingModels) -> SpeculativeConfig | None:
    """Build the draft method of a case. Raises ConfigError."""
    method = case["method"]
    if method == "none":
        return None
    own: dict[str, Any] = {"method": method}
    if method in MODELS:
        own["method"] = BESIDE.get(method, method)
        own["model"] = models.draft_model(case["weights"], own["method"])
    if method in BESIDE:
        own["text_drafts"] = "suffix"
    if case["rows"] == "wide":
        own |= {"wide_rows": 32, "draft_text_tokens": 64}
    if case["rows"] == "longer":
        own["max_block_drafts"] = 7
    if case["drafts"] == "fp8":
        own["draft_quantize"] = "fp8"
    partial = {} if case["partial"] == "whole" else {**SPECPV, "specpv_lossless": case["partial"] == "lossless"}
    depth = 4 if case["shape"] in ADAPTIVE else 3
    return SpeculativeConfig(num_speculative_tokens=depth, strict=True, **own, **partial, **SHAPES[case["shape"]])


def load(case: Case, models: DraftingModels) -> Runtime:
    """A case's runtime. Raises ConfigError where it is refused."""
    given, options = speculation(case, models), runtime_options(case)
    if case["device"] == "steps":
        return Runtime.load(models.target(case["weights"], case["method"]), given, device="cpu", **options)
    target, looping = models.target(case["weights"], case["method"]), case["device"] == "loop"
    return load_fake(target, given, device_loop=looping, seed=len(named(case)), lead=2, **options)[0]


def submit(runtime: Runtime, case: Case, prompt: list[int], number: int, **others: Any) -> str:
    named = {"draft_texts": (tuple(PROMPTS[0]), (1, 2))} if case["rows"] == "wide" else {}
    given = {"max_tokens": MAX_TOKENS, "seed": number, **SAMPLING[case["sampling"]], **named, **others}
    params = SamplingParams(**given)
    if case["grammar"] == "bound":
        return submit_with(runtime, Automaton(EDGES), prompt, params)
    return runtime.submit(prompt, params)


class Run:
    """A case's requests, run to their ends."""

    def __init__(self, runtime: Runtime, case: Case) -> None:
        self.runtime, self.case = runtime, case
        self.answers: dict[str, Answer] = defaultdict(lambda: ([], []))
        self.last: dict[str, StepOutput] = {}
        self.growing: list[tuple[OpenPrompt, list[list[int]]]] = []
        if case["prefix"] == "reused":
            self._run([submit(runtime, case, PROMPTS[0][:20], 9, max_tokens=2)])
        elif case["prefix"] == "saved":
            self._run([runtime.submit(PROMPTS[0][:20], SamplingParams(max_tokens=2), session="saved")])
            self._restore()
        slots = SLOTS[case["slots"]]
        extra = slots - len(PROMPTS) + (3 if case["event"] == "full" else 0)  # more than there are slots
        enter = self._open if case["prompt"] == "growing" else partial(submit, runtime, case)
        self.names = [enter(prompt, number) for number, prompt in enumerate(PROMPTS)]
        brief = {"max_tokens": 2} if case["slots"] == "many" else {}
        others = [submit(runtime, case, PROMPTS[1], 5 + n, **brief) for n in range(extra)]
        self._run([*others, *self.names])
        check_invariants(runtime)

    def _restore(self) -> None:
        """Write the session to a file, forget what the device shares, and bring it back."""
        session = self.runtime.session("saved")
        with TemporaryDirectory() as folder:
            session.save(Path(folder) / "session")
            session.close()
            self.runtime.kvcache.forget_all()
            self.runtime.load_session(Path(folder) / "session")

    def _open(self, prompt: list[int], number: int) -> str:
        """The request of a prompt that comes step by step."""
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=number, **SAMPLING[self.case["sampling"]])
        opened = self.runtime.open_prompt(params, max_prompt_tokens=len(prompt))
        self.growing.append((opened, [prompt[start : start + 11] for start in range(0, len(prompt), 11)]))
        return opened.request_id

    def _grow(self, number: int) -> None:
        """The next piece of each prompt; some seem to end with it, and those that have all of theirs end."""
        for each in list(self.growing):
            opened, pieces = each
            if not pieces:
                opened.finish()
                self.growing.remove(each)
                continue
            opened.append(pieces.pop(0))
            if number % 2:
                opened.finish(speculative=True)

    def _run(self, names: list[str]) -> None:
        disturbed = names[-1]
        for number in range(400):
            if not self.runtime.busy and not self.growing:
                return
            if number % 3 == 0:
                self._grow(number)
            begun = len(self.answers[disturbed][0]) > 1 and disturbed not in self.last
            if begun and self.case["event"] == "cancel":
                self.runtime.cancel(disturbed)
            elif begun and self.case["event"] == "limit":
                self.runtime.set_draft_limit(disturbed, (0, 1, None)[number % 3])
            elif begun and self.case["event"] == "pause" and self.runtime.pause(disturbed):
                self.runtime.resume(disturbed)
            for output in self.runtime.step():
                tokens, logprobs = self.answers[output.request_id]
                tokens += output.token_ids
                logprobs += output.logprobs or ()
                if output.finish_reason is not None:
                    self.last[output.request_id] = output
        raise AssertionError(f"still busy after 400 steps: {named(self.case)}")

    def reason(self, name: str) -> str | None:
        """How a request ended."""
        return self.last[name].finish_reason


PLAIN: dict[str, list[Answer]] = {}  # computed once each


def plain(case: Case, models: DraftingModels) -> list[Answer]:
    """The answers of the same target and requests without all that may change no token."""
    decides = {name: case[name] for name in ("weights", "cache", "grammar", "sampling")}
    simple = {**SIMPLEST, "method": "none", **decides}
    target, invariant = models.target(case["weights"], case["method"]), case["ranks"] == "2"
    key = f"{target} {decides} {invariant}"
    if key not in PLAIN:
        options = {**runtime_options(simple), "tp_invariant": invariant, "prefix_reuse": False}
        with Runtime.load(target, device="cpu", **options) as own:
            run = Run(own, simple)
            PLAIN[key] = [run.answers[name] for name in run.names]
    return PLAIN[key]


def check_answer(case: Case, answer: Answer, expected: Answer, prompt: list[int], *, whole: bool) -> None:
    """The tokens and logprobs of a plain run, as far as it goes; with lossy SpecPV while all of the context is seen."""
    count = len(answer[0])
    assert len(expected[0]) == MAX_TOKENS and (count == MAX_TOKENS or not whole)
    if case["partial"] == "lossy":
        count = max(0, min(count, SPECPV["specpv_partial_threshold"] - len(prompt)))
    assert answer[0][:count] == expected[0][:count]
    assert answer[1][:count] == expected[1][:count]
    if case["sampling"] == "logprobs":
        assert len(answer[1]) == len(answer[0]) and all(math.isfinite(each.logprob) for each in answer[1])
    if case["grammar"] == "bound":
        assert accepts(EDGES, answer[0])


def check_run(run: Run, case: Case, expected: list[Answer]) -> None:
    runtime = run.runtime
    for number, (name, prompt) in enumerate(zip(run.names, PROMPTS, strict=True)):
        disturbed = case["event"] == "cancel" and number == len(PROMPTS) - 1
        check_answer(case, run.answers[name], expected[number], prompt, whole=not disturbed)
        assert run.reason(name) == ("cancelled" if disturbed else "length")
        assert run.last[name].error_code is None
    cached = runtime.metrics(run.names[0]).cached_prompt_tokens
    states = case["prompt"] == "growing" and bool(runtime.geometry.config.deltas)  # snapshots lie after the first piece
    assert (cached > 0) == (case["prefix"] != "cold" and not states)
    if case["method"] != "none":
        # a draft length that is chosen is often 0; P-EAGLE's random drafts, and those for random experts, are right by
        # chance alone
        rarely = case["method"] in (*TEXT, "peagle", "mtp") or case["shape"] in ADAPTIVE or case["weights"] == "mxfp4"
        stats = runtime.summary().get("eagle_speculation", {})  # absent where nothing was drafted
        assert stats.get("num_drafts", 0) > 0 or case["shape"] in ADAPTIVE or case["method"] == "ngram"
        assert stats.get("total_accepted_tokens", 0) > 0 or rarely  # else the case would try little
    if case["partial"] != "whole":
        assert runtime.summary()["specpv"]["partial_steps"] > 0
    executor: Any = runtime.executor if case["device"] == "steps" else runtime.executor.inner  # type: ignore[attr-defined]
    assert isinstance(executor, RankedReferenceExecutor) == (case["ranks"] == "2")
    if case["ranks"] == "2" and case["method"] in (*MODELS, "mtp"):
        own = [each for name, each in executor.state.items() if name.startswith("draft_model.k_cache")]
        heads = 1 if case["method"] in ("mtp", "draft_model", "whole_beside") else 4
        assert own and {cache.shape[1] for cache in own} == {heads}  # the draft model is cut, too


@pytest.mark.parametrize(
    "case", [*CASES[:FIRST], *map(later, CASES[FIRST:SECOND]), *map(wide, CASES[SECOND:])], ids=named
)
def test_drafts_beside_all_else_change_no_token(case: Case, models: DraftingModels) -> None:
    expected = plain(case, models)
    with load(case, models) as runtime:
        check_run(Run(runtime, case), case, expected)


REFUSED = [(rule, case) for rule in RULES if rule.message is not None for case in rule.examples()]


@pytest.mark.parametrize(("rule", "case"), REFUSED, ids=[f"{named(case)}" for _, case in REFUSED])
def test_what_does_not_go_together_is_refused_by_name(rule: Any, case: Case, models: DraftingModels) -> None:
    """At load, or the request where it is the request's part."""
    if sum(each.forbids(case) for each in RULES) > 1:
        pytest.skip("an earlier rule refuses it")
    with pytest.raises((ConfigError, RequestError), match=rule.message), load(case, models) as runtime:
        runtime.submit([1], SamplingParams(regex="a", max_tokens=1))


def test_every_pair_stands_in_a_case() -> None:
    """Cases are the same in every process, and hold no pair that a rule forbids."""
    assert covering() == CASES and all(map(allowed, CASES))
    found = {pair for case in CASES for pair in pairs_of(case)}
    assert found == every_pair()
    first = {pair for case in CASES[:FIRST] for pair in pairs_of(case)}
    assert len(first) > 0.54 * len(found)
    both = {pair for case in CASES[:SECOND] for pair in pairs_of(case)}
    assert len(both) > 0.95 * len(found)
    for method in FACTORS["method"]:
        assert any(case["method"] == method for case in CASES[:FIRST])
