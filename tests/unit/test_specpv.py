"""SpecPV whole: lossless below its threshold, the same tokens however and next to whomever a request runs above it."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recording import prompt_of, run_all, run_one, traced
from stages import wide
from tiny_gemma import E2B
from tiny_models import PairPaths, make_pair, make_target

from lowlat import Runtime, RuntimeConfig, SamplingParams, SpeculativeConfig
from lowlat.engine.loading.geometry import make_geometry
from lowlat.errors import ConfigError, RequestError
from lowlat.graphs.program import Op
from lowlat.models.partial_kv import PartialKV, partial_kv
from lowlat.sequence.partial import PartialSlots
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.tools.bench.geometry import random_target, read_geometries
from lowlat.tools.tune.pairs import random_pair, rounded_pair

OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 160, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}
SPECPV: dict[str, Any] = {
    "enable_specpv": True,
    "specpv_block_size": 2,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 6,
    "specpv_n_window_blocks": 2,
    "specpv_n_spec_tokens_buf": 24,
    "specpv_partial_threshold": 30,
    "specpv_full_refresh_steps": 7,
}
BUSHY = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
METHODS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"tree": BUSHY},
    "ngram": {"method": "ngram", "model": None},
    "beside": {"text_drafts": "suffix"},
}
LOSSLESS: dict[str, Any] = {"specpv_lossless": True, "specpv_full_refresh_steps": 12}
GREEDY = SamplingParams(seed=3, max_tokens=40)
SAMPLED = SamplingParams(seed=5, max_tokens=40, temperature=0.9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target and a draft model."""
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


def speculation(pair: PairPaths, **others: Any) -> SpeculativeConfig:
    """SpecPV in small."""
    return SpeculativeConfig(strict=True, **{"model": pair.head, **SPECPV, **others})


def load(pair: PairPaths, *, options: dict[str, Any] | None = None, **others: Any) -> Runtime:
    return Runtime.load(pair.target, speculation(pair, **others), device="cpu", **{**OPTIONS, **(options or {})})


def test_a_text_may_fill_the_context(pair: PairPaths) -> None:
    """A refresh's rows reach after the last block of the slot's table."""
    with load(pair, options={"prefill_chunk": 64, "max_prefill_chunks": 1}) as runtime:
        assert len(run_one(runtime, prompt_of(130), SamplingParams(max_tokens=30))) == 30
        assert runtime.summary()["specpv"]["refreshes"] > 1


@pytest.mark.parametrize("depth", [wide(0), 3])
def test_below_the_threshold_nothing_changes_and_above_it_the_part_is_seen(pair: PairPaths, depth: int) -> None:
    """Every row up to the threshold's position is exact to the bit; some row after it is not."""
    off: dict[str, Any] = {name: getattr(SpeculativeConfig, name) for name in SPECPV}
    with load(pair, num_speculative_tokens=depth, **off) as runtime:
        expected = traced(runtime, prompt_of(20), SAMPLED)
        assert "specpv" not in runtime.summary()
    with load(pair, num_speculative_tokens=depth) as runtime:
        found = traced(runtime, prompt_of(20), SAMPLED)
        report = runtime.summary()["specpv"]
        metrics = runtime.metrics("request-0").to_dict()
    same = [torch.equal(found[1][place], expected[1][place]) for place in sorted(expected[1]) if place in found[1]]
    assert all(same[:10]) and not all(same) and found[0][:10] == expected[0][:10]
    assert report["lossy"] is True and report["refreshes"] >= 2
    assert metrics["specpv"] == {"lossy": True, "partial_steps": report["partial_steps"]}
    assert report["partial_steps"] > report["refreshes"] and report["full_steps"] > 0


@pytest.mark.parametrize("others", [wide("tree"), wide("ngram"), wide("beside")])
def test_tokens_depend_on_nobody_else(pair: PairPaths, others: str) -> None:
    """Alone, after others in the same slot, with a cached prefix, next to requests that join, end and are cancelled."""
    method = {"num_speculative_tokens": 3, **METHODS[others]}
    prompts = [prompt_of(60, seed=1), prompt_of(9, seed=2), prompt_of(26, seed=3)]
    with load(pair, options={"prefix_reuse": False}, **method) as runtime:
        expected = [run_one(runtime, prompt, GREEDY) for prompt in prompts]
    with load(pair, **method) as runtime:
        for _ in range(2):  # the second time prefixes are cached
            names = [runtime.submit(prompt, GREEDY) for prompt in prompts]
            gone = runtime.submit(prompt_of(50, seed=4), SAMPLED)
            tokens: dict[str, list[int]] = {name: [] for name in (*names, gone)}
            while runtime.busy:
                for output in runtime.step():
                    tokens[output.request_id] += output.token_ids
                if gone and len(tokens[gone]) > 15:
                    runtime.cancel(gone)
                    gone = ""
            assert [tokens[name] for name in names] == expected
        assert runtime.summary()["kv"]["hit_tokens"] > 0


def decode_all(runtime: Runtime) -> list[Any]:
    """Tokens, or logprobs, of requests of all kinds, next to one that is cancelled and one that ends by a stop."""
    draws: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logprobs": 2},
        {"stop_token_ids": (*range(12),), "presence_penalty": 0.5},
    ]
    names = [
        runtime.submit(
            prompt_of(25 * k + 20, k), SamplingParams(**{"seed": k, "max_tokens": 36, "temperature": 0.7, **each})
        )
        for k, each in enumerate(draws)
    ]
    gone = runtime.submit(prompt_of(40, seed=7), SAMPLED)
    found: dict[str, list[Any]] = {name: [] for name in (*names, gone)}
    while runtime.busy:
        for output in runtime.step():
            found[output.request_id] += zip(output.token_ids, output.logprobs or output.token_ids, strict=True)
        if len(found[gone]) > 8 and runtime.metrics(gone).finish_reason is None:
            runtime.cancel(gone)
    return [found[name] for name in names]


@pytest.fixture(scope="module")
def alone(pair: PairPaths) -> list[Any]:
    """Return the target's own output for `decode_all`."""
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as runtime:
        return decode_all(runtime)


@pytest.mark.parametrize("case", ["chain", wide("ngram")])
def test_what_is_proposed_and_verified_is_what_the_target_says(pair: PairPaths, alone: list[Any], case: str) -> None:
    with load(pair, **LOSSLESS, **METHODS[case]) as runtime:
        assert decode_all(runtime) == alone
        report, stats = runtime.summary()["specpv"], runtime.summary()["eagle_speculation"]
        assert report["lossy"] is False and report["partial_steps"] > 20 and report["refreshes"] > 3
        assert 0 < report["accepted_tokens"] < report["verified_tokens"]
        assert stats["by_source"]["specpv"]["accepted_tokens"] <= report["accepted_tokens"]


@pytest.mark.second
@pytest.mark.parametrize("limit", [0, wide(1)])
def test_a_request_with_few_drafts_has_all_that_is_proposed_verified(pair: PairPaths, limit: int) -> None:
    """Its limit is of each partial step's drafts, before and after a verification."""
    with load(pair, **LOSSLESS, specpv_n_spec_tokens_buf=12) as runtime:
        name = runtime.submit(prompt_of(40), replace(GREEDY, max_draft_tokens=limit))
        tokens = run_all(runtime)[name]
        report, steps = runtime.summary()["specpv"], runtime.metrics(name).num_steps
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as runtime:
        assert tokens == run_one(runtime, prompt_of(40), GREEDY)
    assert report["accepted_tokens"] > 0.8 * report["verified_tokens"] > 4 * steps
    assert report["partial_steps"] >= report["verified_tokens"] / (1 + limit)


def test_a_refresh_makes_all_keys_and_values_exact(pair: PairPaths) -> None:
    """Partial steps write inexact keys and values; after a refresh every position has those of prefill."""
    caches: list[dict[str, torch.Tensor]] = []
    with load(pair) as runtime:
        name = runtime.submit(prompt_of(45), GREEDY)
        while runtime.scheduler.slot(name) is None:
            runtime.step()
        request = runtime._requests[name]
        slots: Any = runtime._steps.proposer.slots  # type: ignore[attr-defined]
        refresh, refreshed = slots.refresh, []

        def watch(slot: int, length: int) -> Any:
            refreshed.append(length)
            caches.append(positions(runtime, request.table, length - 1))  # before it
            return refresh(slot, length)

        slots.refresh = watch
        while len(refreshed) < 3:
            runtime.step()
        after = positions(runtime, request.table, refreshed[-1] - 1)
        text = request.committed[: refreshed[-1] - 1]
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as runtime:
        run_one(runtime, text, SamplingParams(max_tokens=1))
        cached = runtime.kvcache.admit("again", text, len(text), 0)
        assert cached is not None and cached.num_cached_tokens >= 40
        exact = positions(runtime, cached.table, cached.num_cached_tokens)
    errors = [
        max(float((found[cache][:, : wanted.shape[1]] - wanted).abs().max()) for cache, wanted in exact.items())
        for found in (caches[-1], after)
    ]
    assert errors[0] > 1e-3 > 1e-4 > errors[1]


def positions(runtime: Runtime, table: Any, count: int) -> dict[str, torch.Tensor]:
    """The target's keys and values of a slot's first positions, [G, n, D] by cache."""
    state = runtime.executor.state
    names = [name for name in state if name.startswith(("k_cache.", "v_cache."))]
    return {name: state[name][list(table)].transpose(0, 1).flatten(1, 2)[:, :count].clone() for name in names}


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text"])
def test_layers_with_windows_attend_as_ever(family: str, tmp_path: Path) -> None:
    """MoE layers with sinks, and values that are keys in wider heads: every other layer has a window."""
    own = {"num_hidden_layers": 4} if family == "gemma4_text" else {}
    pair = make_pair(tmp_path, family, sliding_window=8, **own)
    with load(pair) as runtime:
        kinds: list[tuple[str, Any]] = []

        def hook(op: Op, _: Any) -> None:
            if op.kind in ("attention", "partial_attention") and op.reads["k_cache"].startswith("k_cache"):
                kinds.append((op.kind, op.params.get("window")))

        runtime.executor.set_hook(hook)
        tokens = run_one(runtime, prompt_of(40), GREEDY)
        assert len(tokens) == GREEDY.max_tokens
        assert set(kinds) == {("attention", 8), ("partial_attention", None)}
        assert runtime.summary()["specpv"]["partial_steps"] > 10


def test_what_it_cannot_be_combined_with_is_refused(pair: PairPaths, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"share_decoded": True}, "share_decoded"),
        ({"specpv_block_size": 3}, {}, "block_size 4 must be a multiple of specpv_block_size 3"),
        ({"specpv_n_spec_tokens_buf": 8}, {}, "specpv_n_spec_tokens_buf 8 must be above 8"),
        ({}, {"max_prefill_chunks": 2}, "specpv_n_spec_tokens_buf 24 exceeds 16"),
        ({"specpv_partial_threshold": 160}, {}, "max_context 160 never reaches 160 tokens"),
        ({"specpv_n_retrieval_blocks": 77}, {}, "max_context 160 never reaches 162 tokens"),
        ({**LOSSLESS, "specpv_n_spec_tokens_buf": 32}, {}, "specpv_n_spec_tokens_buf 32 exceeds 31, the proposals"),
    ]
    for own, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            load(pair, options=options, **own)
    with pytest.raises(ConfigError, match="specpv_lossless goes with chains and their own acceptance, and tree is"):
        speculation(pair, specpv_lossless=True, tree=BUSHY, num_speculative_tokens=3)
    with load(pair, specpv_lossless=True) as runtime, pytest.raises(RequestError, match=r"no grammar's .* specpv_"):
        runtime.submit(prompt_of(5), SamplingParams(max_tokens=9, choice=("a", "b")))
    with pytest.raises(ConfigError, match="enable_specpv goes with a fixed number of drafts"):
        speculation(pair, adaptive_width=True)
    with pytest.raises(ConfigError, match="specpv_block_size is an option of SpecPV, and enable_specpv is off"):
        SpeculativeConfig(model="head", specpv_block_size=32)
    shared = tmp_path / "shared"
    make_target(shared, "gemma4_text", **E2B)
    config = speculation(pair, method="ngram", model=None)
    with pytest.raises(ConfigError, match="layers of this model read other layers' keys and values"):
        Runtime.load(shared, config, device="cpu", **OPTIONS)
    windowed = tmp_path / "windowed"
    make_target(windowed, "gpt_oss", layer_types=["sliding_attention"] * 2, num_hidden_layers=2)
    config = SpeculativeConfig(method="ngram", **SPECPV)
    with pytest.raises(ConfigError, match="every layer of this model has a window"):
        Runtime.load(windowed, config, device="cpu", **OPTIONS)


@pytest.mark.parametrize(
    ("batch", "context", "begins", "buffer"),
    [(1, 32768, None, 11), (1, 262144, 132, 15), (2, 131072, 84, 15), (4, 131072, 60, 15), (8, 131072, 51, 15)],
)
def test_lossless_begins_where_it_pays_by_bytes(
    tmp_path: Path, batch: int, context: int, begins: int | None, buffer: int
) -> None:
    """Of Llama-3.1-8B's shape, by its defaults; a threshold that was chosen is kept, and a buffer."""
    config = random_target(read_geometries()["llama-8b"], tmp_path, "bfloat16").config
    options = RuntimeConfig(max_batch=batch, max_context=context)
    lossless = SpeculativeConfig("head", enable_specpv=True, specpv_lossless=True)
    if begins is None:
        with pytest.raises(ConfigError, match=f"slower than .* up to max_context {context} with max_batch {batch}"):
            partial_kv(lossless, options, config, 8, 16.06e9, 0.85e9)
        lossless = replace(lossless, specpv_partial_threshold=8192)
    sizes = partial_kv(lossless, options, config, 8, 16.06e9, 0.85e9)
    assert sizes is not None and (sizes.threshold, sizes.buffer) == (1024 * (begins or 8), buffer)
    own = partial_kv(
        replace(lossless, specpv_n_spec_tokens_buf=23, specpv_partial_threshold=9), options, config, 8, 16e9
    )
    assert own is not None and (own.threshold, own.buffer) == (4272, 23)


def test_lossy_begins_where_it_was_measured_to_pay_and_a_chosen_threshold_is_kept(tmp_path: Path) -> None:
    config = random_target(read_geometries()["llama-8b"], tmp_path, "bfloat16").config
    lossy, options = SpeculativeConfig("head", enable_specpv=True), RuntimeConfig(max_context=65536)
    for asked, is_lossless, begins in ((None, False, 32768), (8192, False, 8192), (0, False, 4272), (8192, True, 8192)):
        own = replace(lossy, specpv_partial_threshold=asked, specpv_lossless=is_lossless)
        sizes = partial_kv(own, options, config, 8, 16.06e9, 0.85e9)
        assert sizes is not None and sizes.threshold == begins
    with pytest.raises(ConfigError, match=r"max_context 16384 never reaches 32768 .* \(specpv_partial_threshold"):
        partial_kv(lossy, replace(options, max_context=16384), config, 8)


def test_lossless_begins_sooner_where_weights_are_rounded(tmp_path: Path) -> None:
    pair, options = random_pair("llama-8b", tmp_path), RuntimeConfig(max_batch=2, max_context=131072, quantize="fp8")
    lossless = SpeculativeConfig("head", enable_specpv=True, specpv_lossless=True)
    topologies = {depth: TreeTopology.chain(depth) for depth in (0, 3)}
    found = [
        make_geometry(each.config, each.speculator, topologies, options, lossless).partial
        for each in (pair, rounded_pair(pair, options, "fp8"))
    ]
    plain, rounded = (each.threshold for each in found if each is not None)
    assert 0.5 * plain < rounded < 0.65 * plain


@pytest.mark.parametrize("tokens", [1, 3])
def test_cycles_of_lossless_are_whole_whenever_a_refresh_is_due(tokens: int) -> None:
    """A refresh waits for the verification after its time: it shortens no cycle."""
    sizes = PartialKV(4, 1, 2, 1, 4, buffer=15, threshold=20, num_refresh_steps=12, lossless=True)
    slots, length, steps, between = PartialSlots(sizes, 1, 4), 40, list[int](), list[int]()
    slots.join(0, length)
    slots.refresh(0, length)
    for _ in range(6):
        steps.append(0)
        while not slots.must_verify(0, 4):
            assert slots.num_certain({0: length}, 4, 0) and not slots.is_due(0, length)
            slots.propose(0, [0] * tokens, ended=False)
            slots.count_step(0)
            steps[-1] += 1
        slots.verified(0, 10)
        length += 11
        if slots.is_due(0, length):
            slots.refresh(0, length)
            between.append(sum(steps) - sum(between))
    assert set(steps) == {(15 - 4) // tokens + 1}
    assert between and all(12 <= count < 12 + steps[0] for count in between)


@given(st.integers(0, 1 << 30), st.integers(1, 8))
def test_no_refresh_falls_due_where_steps_are_certain(seed: int, most: int) -> None:
    """However many tokens each step brings: a refresh recomputes no more than it can, and the schedule says before."""
    draw = random.Random(seed)
    sizes = PartialKV(4, 1, 2, 1, 4, draw.randint(most + 1, 40), draw.randint(20, 60), draw.randint(1, 9))
    slots, length = PartialSlots(sizes, 1, most), draw.randint(1, 70)
    slots.join(0, length)
    for _ in range(40):
        if slots.is_due(0, length):
            found = slots.refresh(0, length)
            assert 1 <= found.count <= sizes.buffer and found.start + found.count == length
            assert slots.shifts[0] == sizes.shift(length - 1) >= sizes.block
            assert found.span <= found.start and not slots.is_due(0, length)
        certain = slots.num_certain({0: length}, most, 0)
        assert certain is not None and certain >= 1
        for behind in range(draw.randint(1, certain)):
            assert not slots.is_due(0, length) or behind == 0
            length += draw.randint(1, most)
            slots.count_step(0)
    assert slots.report()["specpv"]["lossy"]
