"""kv_cache_gib: the blocks of every pool, what a GPU has left, what is refused, and prefixes of many conversations."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import prompt_of, run_all
from stages import wide
from tiny_models import KERNEL_HYBRID, make_pair, make_target, make_targets

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.loading import loading, pool_size
from lowlat.engine.loading.geometry import make_geometry, rank_geometries
from lowlat.engine.loading.pool_size import MARGIN_BYTES, MARGIN_SHARE, fill_devices, kv_bytes
from lowlat.engine.memory.plan import MemoryNeed
from lowlat.errors import ConfigError, RequestError
from lowlat.kernels.toolchain.kernel import H200
from lowlat.models.target import read_model_config
from lowlat.options.runtime import RuntimeConfig
from lowlat.speculators.methods import plan_speculator
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.state import StepGeometry, state_specs
from lowlat.tools.precompile import kernels_of

GIB = 1 << 30
CHUNK = 16
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_batch": 1,
    "max_context": 256,
    "block_size": 8,
    "prefill_chunk": CHUNK,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {},  # every other layer has a window of 16
    "qwen3_5_text": {"gain": 0.5},
}
PARAMS = SamplingParams(max_tokens=4, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return make_targets(tmp_path_factory, FAMILIES)


def geometry_of(target: Path, draft: Path | None = None, **options: Any) -> StepGeometry:
    """The shapes of a target's programs, with a draft model's of three tokens where one is given."""
    given = RuntimeConfig(**{**OPTIONS, **options})
    config = read_model_config(target, dtype=given.dtype)
    if draft is None:
        return make_geometry(config, None, {0: TreeTopology.chain(0)}, given, None)
    speculative = SpeculativeConfig(model=draft, num_speculative_tokens=3)
    topologies = {depth: TreeTopology.chain(depth) for depth in (0, 3)}
    return make_geometry(config, plan_speculator(speculative, config, target), topologies, given, speculative)


def sizes(geometry: StepGeometry) -> dict[str, int]:
    """The blocks of each pool by its window; "": the first pool's."""
    return {"": geometry.num_blocks, **{str(pool.window): pool.num_blocks for pool in geometry.window_pools}}


def with_more(geometry: StepGeometry, **options: Any) -> StepGeometry:
    """The same with one block more in the first pool, and what follows from it."""
    whole = replace(geometry, num_blocks=0, window_blocks=(), num_snapshots=0)
    given = RuntimeConfig(**{**OPTIONS, **options, "kv_blocks": geometry.num_blocks + 1})
    return pool_size.settle_pools(whole, given, lambda each: [each])


def test_a_dense_model_has_the_blocks_that_fit(targets: Mapping[str, Path]) -> None:
    block = 2 * 3 * 2 * 8 * 8 * 4  # keys and values, layers, KV heads, positions, head size, float32
    default = geometry_of(targets["llama"])
    assert sizes(default) == {"": 34} and default.num_kv_tokens == 33 * 8  # 257 positions, and the null block
    for count in (34, 35, 1000, 54321):
        for more in (0, block - 1):
            found = geometry_of(targets["llama"], kv_cache_gib=(count * block + more) / GIB)
            assert sizes(found) == {"": count} and kv_bytes(found) == count * block


def test_windows_are_scaled_by_the_requests_that_the_first_pool_holds(targets: Mapping[str, Path]) -> None:
    default = geometry_of(targets["gpt_oss"])
    assert default.table_width == 33 and set(sizes(default)) == {"", "16"}
    a_request = default.window_pools[0].num_blocks - 1
    for requests in (1, 2, 7, 100):
        limit = kv_bytes(geometry_of(targets["gpt_oss"], kv_blocks=requests * 33 + 1))
        found = geometry_of(targets["gpt_oss"], kv_cache_gib=limit / GIB)
        assert sizes(found) == {"": requests * 33 + 1, "16": requests * a_request + 1}
        by_pool = {spec.pool: spec.shape[0] for spec in state_specs(found) if spec.paging is not None}
        assert by_pool == {"": found.num_blocks, found.window_pools[0].suffix: found.window_pools[0].num_blocks}
        assert kv_bytes(found) == limit
        # one block less than the next request's windows need: nothing is over the limit, nor would one more fit
        for size in (limit + 1, kv_bytes(geometry_of(targets["gpt_oss"], kv_blocks=(requests + 1) * 33)) + 1):
            found = geometry_of(targets["gpt_oss"], kv_cache_gib=size / GIB)
            assert kv_bytes(found) <= size < kv_bytes(with_more(found))


def test_recurrent_states_and_snapshots_are_no_part_of_it(targets: Mapping[str, Path]) -> None:
    """Snapshots have state_cache_gib; they are as many a request of the largest size as they are a slot."""
    small = geometry_of(targets["qwen3_5_text"])
    limit = kv_bytes(geometry_of(targets["qwen3_5_text"], kv_blocks=10 * 33))
    large = geometry_of(targets["qwen3_5_text"], kv_cache_gib=limit / GIB)
    assert large.num_blocks == 10 * 33 and kv_bytes(large) == limit
    assert small.num_snapshots == 32 and large.num_snapshots == 10 * 32
    few = geometry_of(
        targets["qwen3_5_text"], kv_cache_gib=limit / GIB, state_cache_gib=20 * small.snapshot_bytes / GIB
    )
    assert few.num_blocks == large.num_blocks and few.num_snapshots == 20
    off = geometry_of(targets["qwen3_5_text"], kv_cache_gib=limit / GIB, prefix_reuse=False)
    assert off.num_blocks == large.num_blocks and off.num_snapshots == 0


def test_layers_of_a_draft_model_are_in_it(tmp_path: Path) -> None:
    paths = make_pair(tmp_path, "llama")
    alone = geometry_of(paths.target, kv_cache_gib=0.01)
    both = geometry_of(paths.target, paths.head, kv_cache_gib=0.01)
    own = [spec for spec in state_specs(both) if spec.paging is not None and spec.shape[0] == both.num_blocks]
    assert {spec.name for spec in own} > {spec.name for spec in state_specs(alone) if spec.paging is not None}
    assert both.num_blocks < alone.num_blocks and kv_bytes(both) == sum(spec.num_bytes for spec in own)
    assert kv_bytes(both) <= 0.01 * GIB < kv_bytes(both) * (both.num_blocks + 1) / both.num_blocks


def test_of_ranks_the_one_that_a_block_takes_most_of_decides(targets: Mapping[str, Path]) -> None:
    options = RuntimeConfig(**OPTIONS, kv_cache_gib=0.01, tensor_parallel_size=2)
    whole = geometry_of(targets["llama"], kv_cache_gib=0.01, tensor_parallel_size=2)
    ranks = rank_geometries(whole, options, None)
    assert {rank.num_blocks for rank in ranks} == {whole.num_blocks}
    taken = max(map(kv_bytes, ranks))
    assert taken <= 0.01 * GIB < taken * (whole.num_blocks + 1) / whole.num_blocks
    assert whole.num_blocks > 1.9 * geometry_of(targets["llama"], kv_cache_gib=0.01).num_blocks


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", "one request of max_context 256 takes; raise kv_cache_gib, or lower max_context"),
        (
            "gpt_oss",
            "and the windows' layers of max_batch 1 takes; raise kv_cache_gib, or lower max_context or max_batc",
        ),
    ],
)
def test_less_than_a_request_is_refused_with_what_it_takes(
    family: str, words: str, targets: Mapping[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_gib 1e-06 is less than the .*{words}") as refused:
        geometry_of(targets[family], kv_cache_gib=1e-6)
    least = float(str(refused.value).split("less than the ")[1].split(" GiB")[0])
    assert geometry_of(targets[family], kv_cache_gib=least).num_blocks == 34
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        geometry_of(targets[family], kv_cache_gib=least - 2e-6)


def test_all_that_is_free_is_refused_without_a_gpu_of_its_own(targets: Mapping[str, Path]) -> None:
    with pytest.raises(ConfigError, match="kv_cache_gib 'free' is what a GPU has left, and this runtime is on cpu"):
        Runtime.load(targets["llama"], **OPTIONS, kv_cache_gib="free")
    given = RuntimeConfig(kv_cache_gib="free")
    pool_size.check_free(given, torch.device("cuda"))
    pool_size.check_free(RuntimeConfig(kv_cache_gib=1.0), torch.device("cpu"), shares=True)
    with pytest.raises(ConfigError, match="kv_cache_gib 'free' is for a model that has its GPUs to itself"):
        pool_size.check_free(given, torch.device("cuda"), shares=True)


def test_the_gpu_with_the_least_left_decides(targets: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = RuntimeConfig(**{**OPTIONS, "tensor_parallel_size": 2, "kv_cache_gib": "free"})
    whole = geometry_of(targets["gpt_oss"], kv_cache_gib="free", tensor_parallel_size=2)
    assert whole.num_blocks == 34  # of one request, until it is known
    ranks, gpus = rank_geometries(whole, options, None), [torch.device("cuda", number) for number in (0, 1)]
    needs = [MemoryNeed(5 * GIB, kv_bytes(rank), 7, GIB, loading_bytes=3 << 20) for rank in ranks]
    free = {gpus[0]: 12 * GIB, gpus[1]: 8 * GIB}
    monkeypatch.setattr(pool_size, "available_bytes", lambda device: free[device])
    found, own = fill_devices(whole, ranks, options, needs, gpus)
    assert {rank.num_blocks for rank in own} == {found.num_blocks}
    assert all(rank.window_blocks == found.window_blocks and sizes(rank) == sizes(found) for rank in own)
    left = free[gpus[1]] - MARGIN_BYTES - free[gpus[1]] // MARGIN_SHARE - 6 * GIB - 7  # packing is in the caches
    assert kv_bytes(own[1]) <= left < kv_bytes(own[1]) * (found.num_blocks + 33) / found.num_blocks
    free[gpus[0]] = free[gpus[1]] - (200 << 20)
    assert fill_devices(whole, ranks, options, needs, gpus)[0].num_blocks < found.num_blocks
    shared, _ = fill_devices(whole, ranks, options, [replace(need, weights_bytes=GIB) for need in needs], gpus[1:] * 2)
    left = free[gpus[1]] - MARGIN_BYTES - free[gpus[1]] // MARGIN_SHARE - 4 * GIB - 14
    assert (
        abs(2 * kv_bytes(replace(own[1], num_blocks=shared.num_blocks, window_blocks=shared.window_blocks)) / left - 1)
        < 0.01
    )
    free[gpus[1]] = 6 * GIB
    with pytest.raises(
        ConfigError, match=r"cuda:1 has 6\.00 GiB free, and 1\.\d+ GiB more .* lower max_context or max_b"
    ):
        fill_devices(whole, ranks, options, needs, gpus)


def test_what_is_not_needed_to_load_is_left_to_the_cache(
    targets: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing takes memory in which the caches lie afterwards: a cache smaller than that adds nothing to the need."""
    whole = geometry_of(targets["llama"], kv_cache_gib="free")
    options = RuntimeConfig(**{**OPTIONS, "kv_cache_gib": "free"})
    margin = MARGIN_BYTES + 3 * GIB // MARGIN_SHARE
    need = MemoryNeed(GIB - margin, kv_bytes(whole), GIB, 0, loading_bytes=GIB - kv_bytes(whole))
    gpu = torch.device("cuda")
    monkeypatch.setattr(pool_size, "available_bytes", lambda device: 3 * GIB)
    found, _ = fill_devices(whole, [whole], options, [need], [gpu])
    assert kv_bytes(found) <= GIB < kv_bytes(found) * (found.num_blocks + 1) / found.num_blocks


@pytest.mark.parametrize("family", ["llama", wide("qwen3_5_text")])
def test_a_load_takes_what_is_free(
    family: str, targets: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a device that says how much that is, and the log says how many tokens it holds; they are the same tokens."""
    with Runtime.load(targets[family], **OPTIONS, state_cache_gib=0.001) as runtime:
        name = runtime.submit(prompt_of(40), PARAMS)
        expected = run_all(runtime)[name]
        (held,) = runtime.memory
    free = held.need.total_bytes + (8 << 20)
    free = (free + MARGIN_BYTES) * MARGIN_SHARE // (MARGIN_SHARE - 1)
    monkeypatch.setattr(loading, "check_free", lambda *_, **__: None)
    monkeypatch.setattr(pool_size, "available_bytes", lambda device: free)
    with (
        caplog.at_level(logging.INFO),
        Runtime.load(targets[family], **OPTIONS, state_cache_gib=0.001, kv_cache_gib="free") as runtime,
    ):
        name = runtime.submit(prompt_of(40), PARAMS)
        assert run_all(runtime)[name] == expected
        assert 0 <= held.need.total_bytes + (8 << 20) - runtime.memory[0].need.total_bytes < 1 << 20
        tokens = runtime.summary()["kv"]["capacity_tokens"]
        assert tokens == runtime.geometry.num_kv_tokens > 2000
        assert f"the KV cache holds {tokens} tokens, {(tokens // 8) // 33} requests of max_context 256" in caplog.text


def test_a_request_is_bounded_by_max_context_alone(targets: Mapping[str, Path]) -> None:
    with Runtime.load(targets["llama"], **OPTIONS, kv_cache_gib=0.01) as runtime:
        with pytest.raises(RequestError, match="max_context"):
            runtime.submit(prompt_of(250), SamplingParams(max_tokens=7))
        runtime.submit(prompt_of(250), SamplingParams(max_tokens=6))


def conversations(runtime: Runtime, count: int) -> tuple[int, int]:
    """Hit tokens of two turns of so many conversations, one after the other, and those that all could have."""
    prompts = [prompt_of(6 * CHUNK + 3, seed=number) for number in range(count)]
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            name = runtime.submit(prompt, PARAMS)
            answer = run_all(runtime)[name]
            runtime.kvcache.invariants()
            prompts[number] = [*prompt, *answer, *prompt_of(2 * CHUNK, seed=number + 100)]
    return runtime.kvcache.stats().hit_tokens, count * 6 * CHUNK


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_of_more_conversations_than_slots_stay(family: str, targets: Mapping[str, Path]) -> None:
    """Ten of them take turns in one slot: the usual cache has the last one's prefix evicted, a larger one none."""
    with Runtime.load(targets[family], **OPTIONS, state_cache_gib=0.01) as runtime:
        usual, possible = conversations(runtime, 10)
    with Runtime.load(targets[family], **OPTIONS, state_cache_gib=0.01, kv_cache_gib=0.02) as runtime:
        assert runtime.geometry.num_blocks > 10 * 33
        larger, _ = conversations(runtime, 10)
    assert usual < 0.3 * possible and larger == possible


def test_kernels_do_not_depend_on_the_pool(tmp_path: Path) -> None:
    """What is compiled ahead serves a cache of any size."""
    make_target(tmp_path, "qwen3_5_text", hidden_size=128, intermediate_size=192, **KERNEL_HYBRID)
    names = []
    for size in (None, 1.5, "free"):
        options = RuntimeConfig(max_batch=2, max_context=256, dtype="bfloat16", kv_cache_gib=size)
        names.append(sorted(kernels_of(tmp_path, None, options, H200)))
    assert names[0] == names[1] == names[2] and len(names[0]) > 10
