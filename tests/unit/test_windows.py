"""Layers of a sliding window keep few blocks of a long request: the tokens are those of one pool for all layers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import Trace, assert_same, outputs_of, prompt_of, run_all, traced
from stages import later, wide
from tiny_gemma import E2B, GEMMA_31B
from tiny_models import PairPaths, make_pair, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.step import state

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_batch": 2,
    "max_context": 200,
    "block_size": 4,
    "prefill_chunk": 16,
    "max_prefill_chunks": 2,
}
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, seed=3)  # the ring comes round
METHODS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chain": {"method": "eagle3", "num_speculative_tokens": 3},
    "tree": {"method": "eagle3", "num_speculative_tokens": 2, "tree": [[0], [1], [0, 0], [1, 0], [0, 1]]},
    "widths": {"method": "eagle3", "num_speculative_tokens": 4, "adaptive_width": True},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A target of which every other layer has a window, with a draft model that has one, too."""
    directory = tmp_path_factory.mktemp("windows")
    return make_pair(directory, "gpt_oss", sliding_window=6, max_position_embeddings=2048)


def load(pair: PairPaths, method: str, **options: Any) -> Runtime:
    own = METHODS[method]
    speculative = SpeculativeConfig(model=pair.head, strict=True, **own) if own else None
    return Runtime.load(pair.target, speculative, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> dict[int, Trace]:
    """By the length of its prompt: of one pool of blocks for all layers, without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "kept_windows", lambda windows, max_context: ())
        with load(pair, "alone", prefix_reuse=False) as runtime:
            assert not runtime.kvcache.pool_stats()
            return {length: traced(runtime, prompt_of(length), SAMPLED) for length in (57, 49)}


@pytest.mark.parametrize("method", [wide("tree"), later("widths")])
def test_a_text_of_many_windows_has_the_tokens_of_one_pool(
    method: str, pair: PairPaths, expected: dict[int, Trace]
) -> None:
    """Alone, after a cached prefix, and next to requests that join, are cancelled and take the blocks it gave back."""
    with load(pair, method) as runtime:
        assert_same(traced(runtime, prompt_of(57), SAMPLED), expected[57])
        assert_same(traced(runtime, prompt_of(49), SAMPLED), expected[49])
        assert runtime.kvcache.stats().hit_tokens == 48
        hits = 48
        name = runtime.submit(prompt_of(57), SAMPLED)
        tokens: list[int] = []
        other = ""
        while runtime.busy:
            for output in runtime.step():
                if output.request_id == name:
                    tokens += output.token_ids
            if len(tokens) in range(8, 32, 4) and runtime.busy:
                if other and any(each["request_id"] == other for each in runtime.slots()):
                    runtime.cancel(other)
                    other = ""
                elif not other:
                    other = runtime.submit(prompt_of(50 + len(tokens), seed=len(tokens)), SAMPLED)
            runtime.kvcache.invariants()
        assert tokens == expected[57][0]
        assert runtime.kvcache.stats().hit_tokens - hits >= 48
        assert all(stats["num_used"] == 0 for stats in runtime.kvcache.pool_stats()["windows"])


@pytest.mark.parametrize("fields", [wide(GEMMA_31B), later(E2B)])
def test_layers_of_other_sizes_keep_few_blocks_too(fields: dict[str, Any], tmp_path: Path) -> None:
    """Heads of one size where a layer has a window, of another where it has none; caches that several layers read."""
    make_target(tmp_path, "gemma4_text", max_position_embeddings=2048, **fields)
    pair = PairPaths(tmp_path, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "kept_windows", lambda windows, max_context: ())
        with load(pair, "alone", prefix_reuse=False) as runtime:
            expected = traced(runtime, prompt_of(49), SAMPLED)
    with load(pair, "alone") as runtime:
        [pool], buffers = runtime.geometry.window_pools, runtime.executor.state
        sizes = {cache.shape[3]: cache.shape[0] for name, cache in buffers.items() if name.startswith("k_cache")}
        assert sizes == {fields["head_dim"]: pool.num_blocks, fields["global_head_dim"]: runtime.geometry.num_blocks}
        for hits in (0, 48):
            assert_same(traced(runtime, prompt_of(49), SAMPLED), expected)
            assert runtime.kvcache.stats().hit_tokens == hits
            runtime.kvcache.invariants()


@pytest.mark.parametrize("method", [later("chain")])
def test_a_draft_model_s_own_window_has_a_pool_too(method: str, pair: PairPaths, tmp_path: Path) -> None:
    """Its drafts, and so what is accepted of them, are those of one pool; after a cached prefix, too."""
    head = shutil.copytree(pair.head, tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 9}
    (head / "config.json").write_text(json.dumps(config))
    found: list[tuple[list[int], int]] = []
    for pooled in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not pooled:
                patch.setattr(state, "kept_windows", lambda windows, max_context: ())
            with load(PairPaths(pair.target, head), method) as runtime:
                assert [each.window for each in runtime.geometry.window_pools] == ([6, 9] if pooled else [])
                for _ in range(2):
                    name = runtime.submit(prompt_of(49), SAMPLED)
                    tokens = run_all(runtime)[name]
                    drafted = runtime.metrics(name).speculation
                    assert drafted is not None
                    found.append((tokens, drafted.total_accepted_tokens))
                assert runtime.kvcache.stats().hit_tokens == 48
                runtime.kvcache.invariants()
    assert found[0][0] == found[1][0] and found[0] == found[2] and found[1] == found[3] and found[0][1] > 0


def test_the_window_s_pool_is_small_and_holds_as_many_requests(pair: PairPaths) -> None:
    with load(pair, "alone", max_context=2000, block_size=16, prefill_chunk=64) as runtime:
        [pool], geometry = runtime.geometry.window_pools, runtime.geometry
        assert pool.num_blocks < geometry.num_blocks * 0.8
        buffers = runtime.executor.state
        assert (buffers["k_cache.0"].shape[0], buffers["k_cache.1"].shape[0]) == (pool.num_blocks, geometry.num_blocks)
        names = [runtime.submit(prompt_of(300, seed=seed), SamplingParams(max_tokens=1300)) for seed in range(2)]
        while any(each["phase"] != "decoding" for each in runtime.slots()) or len(runtime.slots()) < 2:
            runtime.step()
        [stats] = runtime.summary()["kv"]["windows"]
        assert stats["window"] == 6 and stats["num_used"] < 2 * pool.most_blocks(per_chunk=4)
        for name in names:
            runtime.cancel(name)
        runtime.step()
        runtime.kvcache.invariants()


def test_a_failed_request_s_blocks_are_cleared_in_every_pool(pair: PairPaths) -> None:
    """Its keys are not finite: it ends by name, and nobody meets them again."""
    with load(pair, "alone") as runtime:
        runtime.submit(prompt_of(57), SAMPLED)
        while not runtime.slots() or runtime.slots()[0]["phase"] != "decoding":
            runtime.step()
        session = next(iter(runtime._requests.values()))
        held = sorted(set(runtime.kvcache.commands(session.request_id)["prefill_table.w6"]) - {0})
        runtime.executor.state["v_cache.0"][held] = torch.nan
        outputs = outputs_of(runtime)
        assert outputs[-1].finish_reason == "error"
        assert not runtime.executor.state["v_cache.0"].isnan().any()
        assert runtime.kvcache.pool_stats()["windows"][0]["num_to_clear"] == 0
        runtime.kvcache.invariants()


def test_a_window_that_holds_the_context_has_no_pool(pair: PairPaths, tmp_path: Path) -> None:
    with load(pair, "alone", max_context=6) as runtime:
        assert runtime.geometry.windows == ()
        assert "windows" not in runtime.summary()["kv"]
