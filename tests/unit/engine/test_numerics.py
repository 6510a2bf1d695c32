"""The digest of numerics: what decides bits changes it, and what decides none does not."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PairPaths, make_pair, make_target

from lowlat import Runtime, SpeculativeConfig
from lowlat.engine import numerics
from lowlat.engine.loading.loaded import Loaded
from lowlat.engine.loading.loading import load
from lowlat.engine.numerics import digest_of, numerics_of
from lowlat.executors.devices import DeviceChoice
from lowlat.options.runtime import RuntimeConfig

SIZES: dict[str, Any] = {
    "device": "cpu", "max_batch": 2, "max_context": 64, "block_size": 4, "prefill_chunk": 8, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", hidden_size=64, intermediate_size=64, head_dim=64)


def digest(target: Path, speculative: SpeculativeConfig | None = None, **options: Any) -> str:
    """A runtime's digest, which its summary has, too."""
    with Runtime.load(target, speculative, **{**SIZES, **options}) as runtime:
        assert runtime.summary()["numerics"] == runtime.numerics
        return runtime.numerics


@pytest.fixture(scope="module")
def plain(pair: PairPaths) -> str:
    """The digest of the target with SIZES."""
    found = digest(pair.target)
    assert re.fullmatch("[0-9a-f]{16}", found)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 3, "max_context": 128},
        {"block_size": 8, "max_prefill_chunks": 1, "prefix_reuse": False},
        {"prompt_logprobs": True, "max_queue": 3},
    ],
    ids=lambda options: ", ".join(options) or "the same",
)
def test_what_decides_no_bit_is_not_in_it(options: dict[str, Any], pair: PairPaths, plain: str) -> None:
    assert digest(pair.target, **options) == plain


@pytest.mark.parametrize(
    "options",
    [{}, {"num_speculative_tokens": 5}, {"tree": ((0,), (1,), (0, 0)), "num_speculative_tokens": 2}],
    ids=["chain", "deeper", "tree"],
)
def test_speculation_is_not_in_it(options: dict[str, Any], pair: PairPaths, plain: str) -> None:
    speculative = SpeculativeConfig(**{"model": pair.head, "num_speculative_tokens": 3, "strict": True, **options})
    assert digest(pair.target, speculative) == plain


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 16},
        {"kv_cache_dtype": "fp8"},
        {"quantize": "fp8"},
        {"dtype": "float32"},
        {"tensor_parallel_size": 2},
        {"share_decoded": True},
    ],
    ids=lambda options: ", ".join(options),
)
def test_what_decides_bits_is_in_it(options: dict[str, Any], pair: PairPaths, plain: str) -> None:
    assert digest(pair.target, **options) != plain


def test_activations_are_in_it(pair: PairPaths) -> None:
    assert digest(pair.target, quantize="fp8") != digest(pair.target, quantize="fp8", activations="fp8")


def test_another_geometry_and_lossy_or_imposed_results_are_in_it(pair: PairPaths, plain: str, tmp_path: Path) -> None:
    make_target(tmp_path, "llama", hidden_size=64, intermediate_size=64, head_dim=64, rms_norm_eps=1e-4)
    imposed = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, simulated_acceptance=0.5, strict=True)
    assert len({plain, digest(tmp_path), digest(pair.target, imposed)}) == 3


class OnGpu:
    """A load as it would be on a GPU, which is described and not used."""

    def __init__(self, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded, self._patch = loaded, monkeypatch
        self.choice = DeviceChoice(torch.device("cuda", 0), "graph", "a test")

    def digest(self, capability: tuple[int, int] = (9, 0), executor: str = "graph", **options: Any) -> str:
        """The digest with an executor on a GPU of a capability, with these options."""
        self._patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        config = RuntimeConfig(**{**SIZES, **options})
        geometry = replace(self.loaded.geometry, max_batch=config.max_batch, max_context=config.max_context)
        choice = replace(self.choice, executor=executor)
        return digest_of(numerics_of(replace(self.loaded, choice=choice, geometry=geometry), config))


@pytest.fixture
def on_gpu(pair: PairPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnGpu]:
    loaded = load(pair.target, None, RuntimeConfig(**SIZES))
    yield OnGpu(loaded, monkeypatch)
    loaded.close()


def test_the_class_of_a_device_and_its_kernels_are_in_it(on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    known = on_gpu.digest()
    assert known == on_gpu.digest(executor="eager") != on_gpu.digest(executor="reference")
    assert known != on_gpu.digest((10, 0))
    assert known == on_gpu.digest(max_batch=4)
    assert known != on_gpu.digest(max_context=1 << 20)  # attention's splits are longer
    assert known != on_gpu.digest(tensor_parallel_size=2)
    monkeypatch.setattr(numerics, "_compilers", lambda: ("another",))
    assert on_gpu.digest() != known
    monkeypatch.undo()
    monkeypatch.setattr(numerics, "_source_digest", lambda: "other code")
    assert on_gpu.digest() != known


def test_with_k_in_parts_the_number_of_ranks_is_not_in_it(on_gpu: OnGpu) -> None:
    one = on_gpu.digest(tp_invariant=True)
    assert one == on_gpu.digest(tp_invariant=True, tensor_parallel_size=4) != on_gpu.digest()


def test_what_cannot_be_digested_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be digested"):
        digest_of({"target": object()})
    assert digest_of({"a": 1, "b": {"x", "y"}}) == digest_of({"b": {"y", "x"}, "a": 1})
