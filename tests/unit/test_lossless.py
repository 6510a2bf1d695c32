"""The same seed gives the same tokens, from logits of the same bits, however and next to whomever a request runs."""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from recording import Recorder, Trace, assert_same, prompt_of, run_all, traced
from stages import later, wide
from tiny_dflash import dflash_draft_model
from tiny_models import DISTINCT_FAMILIES, PairPaths, copying_draft_model, make_pair, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import RequestError
from lowlat.speculators.methods import draft_method
from lowlat.step import state

MAX_TOKENS = 12
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8} | {
    "device": "cpu",
    "dtype": "float32",
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalised": (
        {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
        | {"logit_bias": {3: 2.0, 11: -5.0}}
    ),
}
# Tests of two factors that do not meet in the code, such as a family, which makes logits, and a mode, which draws from
# them, have every value of both and not every pair; the first stage has what is plainest.
EVERY_METHOD = [
    wide("ngram", "gpt_oss", "filtered"),
    later("eagle3+", "llama", "sampled"),
    ("ngram+", "llama", "greedy"),
]
TREES: dict[str, tuple[tuple[int, ...], ...]] = {
    "chain-as-tree": ((0,), (0, 0), (0, 0, 0)),
    "wide": tuple((rank,) for rank in range(6)),
    "bushy": ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)),
    "deep": (*((0,) * depth for depth in range(1, 8)), (1,), (1, 0), (1, 0, 0), (0, 1), (0, 1, 0), (0, 0, 0, 1)),
}
DYNAMIC = [(3, 7, 20), (16, 3, 31), (10, 7, 8)]  # the last drafts over 60 rows


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    """A target and a head of every family."""
    return {family: make_pair(tmp_path_factory.mktemp(family), family) for family in DISTINCT_FAMILIES}


def params(mode: str, seed: int = 7, max_tokens: int = MAX_TOKENS, **others: Any) -> SamplingParams:
    """Sampling parameters of a mode."""
    return SamplingParams(seed=seed, max_tokens=max_tokens, **MODES[mode], **others)


def load(pair: PairPaths, depth: int = 7, *, tree: Any = None, method: Any = "eagle3", **options: Any) -> Runtime:
    """A runtime that speculates; a draft model that does not load is an error.

    After a `method+` widths are chosen.
    """
    model: dict[str, Any] = {"model": pair.head, **(tree if isinstance(tree, dict) else {"tree": tree})}
    others = {"ngram": {"prompt_lookup_min": 1}, "suffix": {}, "beside": {**model, "text_drafts": "suffix"}}
    name = method.rstrip("+")
    own: dict[str, Any] = {**others.get(name, model), "adaptive_width": name != method}
    config = SpeculativeConfig(
        method="eagle3" if name == "beside" else name, num_speculative_tokens=depth, strict=True, **own
    )
    return Runtime.load(pair.target, config, **{**OPTIONS, **options})


BASELINES: dict[str, Trace] = {}  # computed once each: many tests compare with the same


def baseline(pair: PairPaths, prompt: list[int], sampling: SamplingParams) -> Trace:
    """The same without a head and without prefix reuse."""
    key = f"{pair.target} {prompt} {sampling}"
    if key not in BASELINES:
        with Runtime.load(pair.target, **{**OPTIONS, "prefix_reuse": False}) as runtime:
            BASELINES[key] = traced(runtime, prompt, sampling)
    return BASELINES[key]


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", "greedy"),
        wide("qwen3", "filtered"),
        later("gpt_oss", "penalised"),
        later("qwen3_5_moe_text", "sampled"),
    ],
)
def test_no_depth_changes_anything(family: str, mode: str, pairs: dict[str, PairPaths]) -> None:
    prompt, sampling = prompt_of(19), params(mode)
    expected = baseline(pairs[family], prompt, sampling)
    with load(pairs[family]) as runtime:
        for depth in (0, 3, 7, random.Random(0).choices(range(8), k=200).__getitem__):
            assert_same(traced(runtime, prompt, sampling, depth), expected)
        speculation = runtime.summary()["eagle_speculation"]
    assert 0 < speculation["total_accepted_tokens"] < speculation["total_draft_tokens"]


@pytest.mark.parametrize(("method", "family", "mode"), EVERY_METHOD)
def test_no_depth_of_drafts_from_text_changes_anything(
    method: str, family: str, mode: str, pairs: dict[str, PairPaths]
) -> None:
    """The text repeats itself, so that some drafts are right and some are not; lengths of chunks, and one token."""
    repeating = prompt_of(6) * 4
    with load(pairs[family], method=method) as runtime:
        for length, depths in ((23, (2, 7)), (8, (7,)), (1, (7,))):
            prompt, sampling = repeating[:length], params(mode)
            expected = baseline(pairs[family], prompt, sampling)
            for depth in depths:
                assert_same(traced(runtime, prompt, sampling, depth), expected)
            changing = random.Random(1).choices(range(8), k=99)
            assert_same(traced(runtime, prompt, sampling, changing.__getitem__), expected)
        speculation = runtime.summary()["eagle_speculation"]
    # repeating is what penalties forbid
    assert speculation["total_accepted_tokens"] < speculation["total_draft_tokens"]
    assert speculation["total_accepted_tokens"] > 0 or mode == "penalised"


@pytest.mark.parametrize(
    ("family", "name", "mode"),
    [
        ("llama", "deep", "sampled"),
        later("gpt_oss", "bushy", "sampled"),
    ],
)
def test_no_tree_changes_anything(family: str, name: str, mode: str, pairs: dict[str, PairPaths]) -> None:
    prompt, sampling = prompt_of(13, seed=2), params(mode)
    expected = baseline(pairs[family], prompt, sampling)
    depth = max(map(len, TREES[name]))
    with load(pairs[family], depth, tree=TREES[name]) as runtime:
        assert_same(traced(runtime, prompt, sampling), expected)
        assert_same(traced(runtime, prompt, sampling, lambda number: depth * (number % 3 > 0)), expected)


def dynamic(top_k: int, drafts: int) -> dict[str, int]:
    """The options of a dynamic tree."""
    return {"dynamic_tree_max_topk": top_k, "max_total_draft_tokens": drafts}


@pytest.mark.parametrize(
    ("family", "shape", "mode"),
    [
        ("llama", DYNAMIC[1], "sampled"),
        later("llama", DYNAMIC[2], "greedy"),
        wide("gpt_oss", DYNAMIC[2], "sampled"),
    ],
)
def test_no_dynamic_tree_changes_anything(
    family: str, shape: tuple[int, int, int], mode: str, pairs: dict[str, PairPaths]
) -> None:
    """Up to the end of the context, past which a draft model's rows reach."""
    prompt, sampling = prompt_of(OPTIONS["max_context"] - MAX_TOKENS, seed=2), params(mode)
    expected, (top_k, depth, drafts) = baseline(pairs[family], prompt, sampling), shape
    with load(pairs[family], depth, tree=dynamic(top_k, drafts)) as runtime:
        assert_same(traced(runtime, prompt, sampling), expected)
        assert_same(traced(runtime, prompt, sampling, lambda number: depth * (number % 3 > 0)), expected)
        speculation = runtime.summary()["eagle_speculation"]
    assert 0 < speculation["total_accepted_tokens"] < speculation["total_draft_tokens"]


def test_trees_accept_what_chains_cannot(pairs: dict[str, PairPaths]) -> None:
    """Else the tests of trees would never have moved a node's KV."""
    moved = []
    for tree in (TREES["wide"], TREES["bushy"], dynamic(5, 12)):
        with load(pairs["llama"], 3 if isinstance(tree, dict) else max(map(len, tree)), tree=tree) as runtime:
            recorder = Recorder(runtime)
            recorder.submit(prompt_of(13, seed=2), params("sampled"))
            run_all(runtime)
            moved.append(recorder.num_moved)
    assert sum(moved) > 3 and moved[-1] > 0


@pytest.fixture(scope="module")
def of_many_forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A target for draft models of every form: its folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("of-many-forms")
    return folder, make_target(folder, "llama", gain=0.45, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("form", "mode", "ways"),
    [
        ({"num_hidden_layers": 2}, "greedy", "bushy adaptive"),
        wide({"num_hidden_layers": 3, "windows": (6, None, 4)}, "sampled", "dynamic"),
        wide({"windows": (5,), "norm_before_residual": False}, "penalised", "adaptive"),
        wide({"final_hidden": True, "num_hidden_layers": 2}, "filtered", "chain"),
        later({"mask_token": 9, "num_hidden_layers": 2, "windows": (6, None), "fc_norm": True}, "sampled", "bushy"),
        wide({"layout": "speculators", "copies": True, "num_hidden_layers": 1}, "sampled", "chain"),
        ({"layout": "z-lab", "copies": True, "conv": (2, 8), "selector": (8, 6)}, "sampled", "chain adaptive"),
        later({"layout": "z-lab", "copies": True, "conv": (3, 16), "selector": (8, 6)}, "greedy", "bushy dynamic"),
        wide({"layout": "deepspec", "copies": True, "markov_rank": 4}, "penalised", "bushy"),
        later(
            {"layout": "speculators", "copies": True, "markov_rank": 8, "markov_head_type": "gated"},
            "filtered",
            "adaptive",
        ),
    ],
    ids=str,
)
def test_no_form_of_draft_model_changes_anything(
    form: dict[str, Any], mode: str, ways: str, of_many_forms: tuple[Path, Any], tmp_path: Path
) -> None:
    """Every method meets every way to draft; the first prompt comes again, when its prefix is found."""
    (folder, target), sampling = of_many_forms, params(mode)
    pair = PairPaths(folder, tmp_path / "head")
    if "layout" in form:
        dflash_draft_model(pair.head, target, **form)
    else:
        copying_draft_model(pair.head, target, draft_vocab_size=80, **form)
    method = draft_method(pair.head)
    prompts = [prompt_of(21), prompt_of(8, seed=1)]
    expected = [baseline(pair, prompt, sampling) for prompt in prompts]
    trees = {"bushy": TREES["bushy"], "dynamic": dynamic(4, 11)}
    for way in ways.split():
        how, tree = method + ("+" if way == "adaptive" else ""), trees.get(way)
        with load(pair, 3 if tree else 5, tree=tree, method=how) as runtime:
            for prompt, trace in zip(prompts + prompts[:1], expected + expected[:1], strict=True):
                assert_same(traced(runtime, prompt, sampling, lambda number: 3 * (number % 4 > 0)), trace)
            speculation = runtime.summary()["eagle_speculation"]
        assert 0 < speculation["total_accepted_tokens"] < speculation["total_draft_tokens"]


class Crowd:
    """Neighbours that come and go around the requests that are watched."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.runtime, self.random = runtime, random.Random(seed)
        self.names: list[str] = []

    def stir(self) -> None:
        """Now and then a neighbour is submitted, now and then one is cancelled."""
        if self.random.random() < 0.35 and self.runtime.scheduler.num_queued < 4:
            prompt = prompt_of(self.random.randrange(1, 40), seed=self.random.randrange(6))
            mode = self.random.choice(list(MODES))
            limit = self.random.choice([None, 0, 2])
            sampling = params(mode, self.random.randrange(99), self.random.randrange(1, 40), max_draft_tokens=limit)
            self.names.append(self.runtime.submit(prompt, sampling))
        if self.random.random() < 0.2 and self.names:
            self._cancel(self.names.pop(self.random.randrange(len(self.names))))

    def leave(self) -> None:
        """All go."""
        while self.names:
            self._cancel(self.names.pop())

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(RequestError):  # it may have ended
            self.runtime.cancel(name)


@pytest.mark.parametrize(
    ("family", "method", "tree", "seed"),
    [
        ("llama", "eagle3", "bushy", 1),
        wide("llama", "suffix", None, 3),
        wide("llama", "eagle3", "dynamic", 6),
        wide("gpt_oss", "eagle3", "bushy", 1),
        later("qwen3_5_moe_text", "eagle3+", None, 7),
    ],
)
def test_no_neighbour_changes_anything(
    family: str, method: str, tree: str | None, seed: int, pairs: dict[str, PairPaths]
) -> None:
    pair, modes = pairs[family], list(MODES)
    wanted = [(prompt_of(5 + 9 * k, seed=k), params(modes[k], seed=k)) for k in range(4)]
    expected = [baseline(pair, *request) for request in wanted]
    depth = 3 if tree else 7
    shape = dynamic(3, 9) if tree == "dynamic" else TREES.get(tree or "")
    with load(pair, depth, tree=shape, method=method, max_queue=16, max_batch=4) as runtime:
        crowd, recorder = Crowd(runtime, seed), Recorder(runtime)
        names: list[str] = []
        tokens: dict[str, list[int]] = {}
        for number in range(400):
            crowd.stir()
            if number % 9 == 4 and len(names) < len(wanted):
                names.append(recorder.submit(*wanted[len(names)]))
            for output in runtime.step(crowd.random.choice([0, depth]) if number % 2 else None):
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            runtime.scheduler.invariants()
            if len(names) == len(wanted) and all(len(tokens.get(name, ())) == MAX_TOKENS for name in names):
                break
        for name, trace in zip(names, expected, strict=True):
            assert_same((tokens[name], recorder.logits[name]), trace)
        crowd.leave()
        run_all(runtime)
        assert runtime.kvcache.stats().num_used == 0


@pytest.mark.parametrize(
    ("family", "mode", "method"),
    [("llama", "greedy", "ngram"), ("llama", "sampled", "eagle3"), wide("gpt_oss", "greedy", "eagle3")],
)
def test_a_reused_prefix_changes_nothing(family: str, mode: str, method: str, pairs: dict[str, PairPaths]) -> None:
    """The second of two equal prompts, and one that shares the first half, find chunks in the cache."""
    pair, sampling = pairs[family], params(mode, max_tokens=10)
    prompt = prompt_of(33)
    other = prompt[:20] + prompt_of(12, seed=8)
    with load(pair, 4, method=method) as runtime:
        for request, cached in ((prompt, 0), (prompt, 32), (other, 16), (prompt[:9], 8)):
            name = runtime.submit(request, sampling)
            run_all(runtime)
            assert runtime.metrics(name).cached_prompt_tokens == cached
            assert_same(traced(runtime, request, sampling), baseline(pair, request, sampling))


@pytest.mark.second
@pytest.mark.parametrize("family", ["llama", wide("gpt_oss"), later("qwen3_5_moe_text")])
def test_a_crowded_pool_changes_nothing(family: str, pairs: dict[str, PairPaths]) -> None:
    """Room for two requests only: cached chunks are evicted, requests wait, blocks change hands."""
    pair, sampling = pairs[family], params("sampled")
    prompts = [prompt_of(20 + k, seed=k % 2) for k in range(3)]
    expected = [baseline(pair, prompt, sampling)[0] for prompt in prompts]
    with load(pair, 3, kv_blocks=28, max_batch=3) as runtime:
        names = [runtime.submit(prompt, sampling) for prompt in prompts]
        tokens = run_all(runtime)
    assert [tokens[name] for name in names] == expected


@pytest.mark.parametrize(
    ("family", "tree"), [("llama", None), later("gpt_oss", "bushy"), wide("qwen3_5_moe_text", None)]
)
def test_long_contexts_lose_nothing(family: str, tree: str | None, pairs: dict[str, PairPaths]) -> None:
    """Past the first tile of keys, and over its end: rows that see the same keys add them in the same order."""
    prompt, sampling = prompt_of(250, seed=5), params("sampled")
    options: dict[str, Any] = {"max_context": 300, "block_size": 16, "prefill_chunk": 64}
    with Runtime.load(pairs[family].target, **{**OPTIONS, **options}) as runtime:
        expected = traced(runtime, prompt, sampling)
    with load(pairs[family], 3, tree=TREES[tree] if tree else None, **options) as runtime:
        assert_same(traced(runtime, prompt, sampling), expected)


@pytest.mark.second
@pytest.mark.parametrize("family", ["llama", wide("gpt_oss")])
def test_chunks_that_run_together_have_the_bits_of_chunks_alone(family: str, pairs: dict[str, PairPaths]) -> None:
    """One or three at once; and after prefixes of other lengths that others have left in the cache."""
    prompt, sampling, found = prompt_of(61, seed=6), params("sampled"), []
    for at_once in (1, 3):
        with load(pairs[family], 3, max_prefill_chunks=at_once) as runtime:
            found.append(traced(runtime, prompt, sampling))
    for cached in (20, 50):
        with load(pairs[family], 3, max_prefill_chunks=3) as runtime:
            traced(runtime, prompt[:cached], sampling)
            found.append(traced(runtime, prompt, sampling))
            assert runtime.kvcache.stats().hit_tokens == (cached - 1) // 8 * 8
    for trace in found[1:]:
        assert_same(trace, found[0])


@pytest.mark.second
@pytest.mark.parametrize("family", ["llama", wide("gpt_oss"), wide("qwen3_5_moe_text")])
def test_ends_of_prompts_have_the_bits_of_whole_chunks(
    family: str, pairs: dict[str, PairPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows run as the first part of a chunk, or as a chunk of which most are dead."""
    options: dict[str, Any] = {"max_context": 300, "block_size": 16, "prefill_chunk": 128}
    found, sampling = [], params("sampled")
    for step in (64, 1 << 20):
        monkeypatch.setattr(state, "SHORT_STEP", step)
        with load(pairs[family], 3, **options) as runtime:
            assert (64 in runtime.geometry.prefill_sizes) == (step == 64)
            found.append([traced(runtime, prompt_of(length, seed=7), sampling) for length in (20, 64, 150)])
    for short, whole in zip(*found, strict=True):
        assert_same(short, whole)


def test_other_seeds_give_other_tokens(pairs: dict[str, PairPaths]) -> None:
    prompt = prompt_of(10)
    traces = [baseline(pairs["llama"], prompt, params("sampled", seed))[0] for seed in range(4)]
    assert len({tuple(tokens) for tokens in traces}) == 4
