"""The proof by kernels: exact in every sweep, and no farther from FP32 than transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import KERNEL_HYBRID, make_pair, make_target

from lowlat import Runtime, SpeculativeConfig
from lowlat.cli.options import bundled
from lowlat.tools.exactness import measure_exactness, measure_fidelity

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "vocab_size": 512}
HYBRID: dict[str, Any] = SIZES | KERNEL_HYBRID | {"max_position_embeddings": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "qwen3_moe": SIZES | {"moe_intermediate_size": 64, "num_local_experts": 8},
    "qwen3_5_text": HYBRID,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
PROMPTS = [[(7 * place + 3 * seed) % 500 for place in range(48)] for seed in range(16)]


def load(target: Path, speculative: SpeculativeConfig | None, _: int | None, **options: Any) -> Runtime:
    return Runtime.load(target, speculative, **options)


def texts(count: int) -> list[str]:
    """Bundled prompts of all domains in turn."""
    domains = json.loads(bundled("prompts.json").read_text()).values()
    return [text for each in zip(*domains, strict=False) for text in each][:count]


def test_the_bundled_pair_is_exact_and_faithful() -> None:
    speculative = SpeculativeConfig(model=bundled("head"), num_speculative_tokens=7)
    options: dict[str, Any] = {"load": load, "device": DEVICE, "max_context": 1024}
    found = measure_exactness(bundled("target"), speculative, texts(8), max_tokens=64, **options)
    assert found.exact, found.verdict
    assert not any(sweep.skipped for sweep in found.sweeps)
    close = measure_fidelity(bundled("target"), speculative, texts(24), max_tokens=64, **options)
    assert close.faithful, close.verdict


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_exact_and_no_farther_from_fp32(family: str, tmp_path: Path) -> None:
    make_target(tmp_path, family, gain=0.4, **FAMILIES[family])
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    options: dict[str, Any] = {"load": load, "device": DEVICE, "dtype": "bfloat16", "max_context": 512}
    sizes: dict[str, Any] = {"prefill_chunk": 64, "block_size": 32}
    found = measure_exactness(tmp_path, NGRAM, PROMPTS[:3], max_tokens=32, **options, **sizes)
    assert found.exact, found.verdict
    close = measure_fidelity(tmp_path, NGRAM, PROMPTS, max_tokens=48, **options, **sizes)
    assert all(each.lower <= 1 for rows in close.rows for each in (rows.kl, rows.nll_error)), close.verdict


def test_a_random_eagle3_pair_is_exact(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama", **SIZES)
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=4)
    options: dict[str, Any] = {"load": load, "device": DEVICE, "dtype": "bfloat16", "max_context": 512}
    found = measure_exactness(pair.target, speculative, PROMPTS[:3], max_tokens=32, **options)
    assert found.exact, found.verdict
