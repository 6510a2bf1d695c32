"""KV caches of 8 bits: what codes mean, whose scales they have, and that nothing depends on how a request runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_walk import Walker, walkable
from quantised_layers import e4m3, store_kv_scales
from recording import tokens_of_six
from safetensors.torch import load_file, save_file
from stages import wide
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SpeculativeConfig
from lowlat.cli.reports.models import model_report
from lowlat.errors import ConfigError
from lowlat.graphs import Bucket
from lowlat.kernels.reference.attention.attention import attention, prefill_attention
from lowlat.kernels.reference.attention.kv_codes import dequantised_kv, quantised_kv
from lowlat.models.target import code_kv, open_target

OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
CODES: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
NUMBERS = e4m3(np.arange(256))
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "tree": {"num_speculative_tokens": 3, "tree": TREE},
    "dynamic": {"num_speculative_tokens": 3, "dynamic_tree_max_topk": 3, "max_total_draft_tokens": 7},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small pair whose target has scales of its cache."""
    made = make_pair(tmp_path_factory.mktemp("llama"), "llama")
    store_kv_scales(made.target)
    return made


@pytest.mark.parametrize("scale", [1.0, 0.0400390625])
def test_a_code_is_the_nearest_of_its_numbers(scale: float) -> None:
    """Ties to even, 448 for what is larger, 127 for NaN; on a GPU, too, whose arithmetic is walked."""
    values = torch.cat([torch.randn(1500) * size for size in (1e-3, 0.05, 1.0, 60.0, 900.0)])
    middles = torch.from_numpy((NUMBERS[:126] + NUMBERS[1:127]) / 2 * scale)
    special = torch.tensor([0.0, -0.0, 448, 449, 1e9, -1e9, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([values, middles, -middles, special]).bfloat16()
    found = quantised_kv(values[:, None, None], torch.tensor([scale]))[:, 0, 0]
    ratios = values.float().numpy() / np.float32(scale)
    finite = np.concatenate([NUMBERS[:127], NUMBERS[128:255]]).astype(np.float64)
    codes = np.concatenate([np.arange(127), np.arange(128, 255)])
    for value, ratio, code in zip(values.tolist(), ratios.tolist(), found.tolist(), strict=True):
        if value != value:
            assert code == 127
            continue
        distances = np.abs(finite - min(max(ratio, -448.0), 448.0))
        nearest = codes[distances == distances.min()]
        assert code in nearest and (len(nearest) <= 1 or code % 2 == 0 or code & 127 == 0), (value, code)
    with walkable(Walker(), "common.kv_codes") as (kernel,):
        own = [kernel.encode(np.float32(value), np.float32(scale)) for value in values.float().tolist()]
    assert own == found.tolist()


def test_a_number_is_its_code_times_the_scale_rounded_once() -> None:
    codes, scale = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 64), 0.0400390625
    wanted = torch.from_numpy(NUMBERS.astype(np.float64) * scale).float().bfloat16()
    wanted[[127, 255]] = torch.nan
    found = dequantised_kv(codes, torch.tensor([scale]), torch.bfloat16).reshape(-1)
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
    with walkable(Walker(), "common.kv_codes") as (kernel,):
        bits = int(np.float32(scale * 2.0**120).view(np.uint32)) >> 16
        words = codes.reshape(-1).view(torch.int32).tolist()
        pairs = [kernel.decode_in_order(word & 0xFFFFFFFF, bits | bits << 16) for word in words]
    own = torch.tensor([half for two in pairs for word in two for half in (word & 0xFFFF, word >> 16)])
    assert torch.equal(own.to(torch.uint16).view(torch.bfloat16).nan_to_num(7), wanted.nan_to_num(7))


def test_attention_is_that_over_the_numbers() -> None:
    """Of a step and of a prompt: the bits of a cache that holds the numbers themselves."""
    scales = torch.tensor([[0.5, 0.0390625], [1.0, 2.0]])
    codes = [torch.randint(0, 127, (4, 2, 16, 8), dtype=torch.uint8) for _ in range(2)]
    numbers = [
        torch.stack([dequantised_kv(page, own, torch.bfloat16) for page in part])
        for part, own in zip(codes, scales, strict=True)
    ]
    table, q = torch.tensor([[2, 1, 3]], dtype=torch.int32), torch.randn(3, 4, 8).bfloat16()
    step: dict[str, Any] = {"slots": torch.tensor([0]), "dense_lens": torch.tensor([30], dtype=torch.int32)}
    step |= {"row_live": torch.ones(3, dtype=torch.uint8), "row_masks": torch.tensor([[1, 3, 5]])}
    for meaning, given in ((attention, step), (prefill_attention, {"chunk": torch.tensor([20, 3])})):
        out = [torch.empty(3, 32).bfloat16() for _ in range(2)]
        for caches, own, result in ((codes, scales, out[0]), (numbers, None, out[1])):
            meaning(q, caches[0], caches[1], table, **given, kv_scales=own, scale=0.3, out=result)
        assert torch.equal(*out)


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> list[list[int]]:
    """The tokens of the target alone, without reuse."""
    with Runtime.load(pair.target, **CODES, prefix_reuse=False) as runtime:
        return tokens_of_six(runtime)


@pytest.mark.second
@pytest.mark.parametrize("way", ["tree", wide("dynamic"), wide("chain")])
def test_speculation_reuse_and_a_crowded_pool_change_nothing(
    way: str, pair: PairPaths, expected: list[list[int]]
) -> None:
    config = SpeculativeConfig(model=pair.head, strict=True, **WAYS[way])
    with Runtime.load(pair.target, config, **CODES, kv_blocks=30) as runtime:
        assert tokens_of_six(runtime) == expected
        assert tokens_of_six(runtime, lambda number: config.num_speculative_tokens * (number % 2)) == expected


def test_a_cache_of_codes_takes_half_the_memory_and_has_the_checkpoint_s_scales(pair: PairPaths) -> None:
    with Runtime.load(pair.target, **CODES) as coded, Runtime.load(pair.target, **OPTIONS, dtype="bfloat16") as plain:
        one, other = (
            {name: tensor for name, tensor in runtime.executor.state.items() if "_cache." in name}
            for runtime in (coded, plain)
        )
        assert {tensor.dtype for tensor in one.values()} == {torch.uint8}
        assert [runtime.summary()["kv"]["cache_dtype"] for runtime in (coded, plain)] == ["fp8", "bfloat16"]
        assert 2 * sum(each.nbytes for each in one.values()) == sum(each.nbytes for each in other.values())
        assert coded.model_config.coded_kv is not None and plain.model_config.coded_kv is None
        first, second = coded.model_config.coded_kv.scales
        heads = coded.model_config.attention.num_kv_heads
        by_head = torch.linspace(0.02, 0.3, heads).bfloat16().tolist()
        assert first == (tuple(by_head), tuple(reversed(by_head)))
        assert second == (
            (torch.tensor(0.03).bfloat16().item(),) * heads,
            (torch.tensor(0.011).bfloat16().item(),) * heads,
        )
        assert torch.equal(coded.executor.program(Bucket(1, 1, 0)).constants["kv_scales.0"], torch.tensor(first))
    kinds = [{**OPTIONS, "dtype": "bfloat16", "kv_cache_dtype": kind} for kind in ("fp8", "auto")]
    narrow, wide = (model_report(pair.target, None, options, buffers=False)["kv"] for options in kinds)
    assert 2 * narrow["bytes_per_token"] == wide["bytes_per_token"]


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor([0.0]), "expected a scale from"),
        (torch.tensor([200.0]), "to 128"),
        (torch.ones(3), "1 or 2 numbers"),
    ],
)
def test_scales_that_cannot_be_are_refused(scale: torch.Tensor, message: str, pair: PairPaths, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if (pair.target / name).exists():
            (tmp_path / name).write_bytes((pair.target / name).read_bytes())
    tensors = load_file(pair.target / "model.safetensors")
    key = "model.layers.1.self_attn.k_scale"
    save_file({**tensors, key: scale}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        Runtime.load(tmp_path, **CODES)
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": scheme,
        "config_groups": {},
    }
    modelopt = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    for alone in (config["quantization_config"], modelopt):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": alone}))
        assert open_target(tmp_path).config.quantisation is None, "weights are plain where the cache alone is quantised"


@pytest.mark.parametrize("name", ["{}_proj.output_scale", "kv_scale"])
def test_older_names_of_scales_are_read(name: str, pair: PairPaths, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((pair.target / "config.json").read_bytes())
    tensors = {key: each for key, each in load_file(pair.target / "model.safetensors").items() if "_scale" not in key}
    scales = {f"model.layers.1.self_attn.{name.format(part)}": torch.tensor(0.25) for part in "kv"}
    save_file(tensors | scales, tmp_path / "model.safetensors")
    config = code_kv(open_target(tmp_path)).config
    heads = config.attention.num_kv_heads
    assert config.coded_kv is not None and {*map(sum, config.coded_kv.scales[1])} == {0.25 * heads}
