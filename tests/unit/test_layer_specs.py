"""Layers that differ within a model: their caches, tables, cuts and weights are their own, and no promise is lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import target_geometry
from layer_changes import with_changes
from lowered import Pair
from recording import outputs_of, run_one
from tiny_models import make_target

from lowlat import ConfigError, Runtime, SamplingParams, SpeculativeConfig
from lowlat.checkpoint.source import JoinedWeights
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, LayerSpec, RopeConfig
from lowlat.models.rank_weights import rank_weights
from lowlat.models.shard import rank_configs
from lowlat.models.target import OpenedTarget, open_target
from lowlat.models.weight_plan import weight_plan
from lowlat.sequence.paged_kv import PagedKV

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": 96, "block_size": 8, "prefill_chunk": 32}
SIZES: dict[str, Any] = {"num_attention_heads": 8, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
GELU = DenseSpec(inner_size=128, activation="gelu_tanh")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, of which tests change the geometry."""
    path = tmp_path_factory.mktemp("llama")
    make_target(path, "llama", gain=0.4, num_hidden_layers=2, head_dim=64, **SIZES)
    return path


def mixed(**changes: Any) -> ModelConfig:
    """A target of three layers, of which the second has other heads, another width and another base."""
    config = target_geometry(num_layers=3, hidden_size=64, vocab_size=128, num_heads=8, head_dim=8, inner_size=64)
    mixer = AttentionSpec(num_heads=16, num_kv_heads=4, head_dim=16, rope=RopeConfig(1e6), window=8)
    layer = LayerSpec(mixer=mixer, ffn=DenseSpec(inner_size=128))
    return replace(config, layers=(config.layers[0], layer, config.layers[2]), **changes)


def test_caches_tables_and_weights_are_each_layer_s_own() -> None:
    config = mixed()
    shapes = [spec.shape for spec in PagedKV(config, 5, 4, {}).specs()]
    assert shapes[::2] == [(5, 2, 4, 8), (5, 4, 4, 16), (5, 2, 4, 8)]
    assert config.windows == (None, 8, None)
    assert [(each.rope.theta, each.dims) for each in config.rotations] == [(1e4, 8), (1e6, 16)]
    plan = weight_plan(config)
    assert [plan[f"layers.{layer}.qkv.weight"][0] for layer in range(3)] == [(96, 64), (384, 64), (96, 64)]
    assert [plan[f"layers.{layer}.down.weight"][0] for layer in range(3)] == [(64, 64), (64, 128), (64, 64)]
    for name, kind in (("attention", "attention"), ("ffn", "FFN")):
        with pytest.raises(ConfigError, match=f"layers that are alike in {kind}, found 2 kinds"):
            getattr(config, name)


@pytest.mark.parametrize(("size", "invariant"), [(2, False), (4, True), (1, True)])
def test_ranks_cut_each_layer_by_its_own_sizes(size: int, invariant: bool) -> None:
    config = mixed()
    whole = {name: torch.zeros(shape) for name, (shape, _) in weight_plan(config).items()}
    parts = rank_configs(config, size, invariant=invariant)
    for part in parts:
        found = {name: tuple(tensor.shape) for name, tensor in rank_weights(whole, part).items()}
        expected = {name: shape for name, (shape, _) in weight_plan(part).items()}
        expected["lm_head.weight"] = (128 // size, 64)
        assert found == expected
    queries = [sum(part.attentions[layer].num_heads for part in parts) for layer in range(3)]
    assert queries == [8, 16, 8]


@pytest.mark.parametrize("further", [{}, {"tensor_parallel_size": 2, "tp_invariant": True}])
def test_speculation_and_ranks_change_no_token_of_layers_that_differ(directory: Path, further: dict[str, Any]) -> None:
    target = open_target(directory, dtype="float32")
    config = with_changes(target.config, softcap=3.0, scale=0.2, ffn=GELU, embedding_scale=2.0, logit_softcap=4.0)
    last = replace(config.layers[1], mixer=replace(config.attentions[1], rope=RopeConfig(1e6), window=16))
    target = replace(target, config=replace(config, layers=(config.layers[0], last)))
    prompt = torch.randint(0, 128, (41,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for speculative in (None, SpeculativeConfig(method="ngram", num_speculative_tokens=3)):
        with Runtime.load(target, speculative, **OPTIONS, **further) as runtime:
            found.append(run_one(runtime, prompt, SamplingParams(max_tokens=16)))
    assert found[0] == found[1] and len(found[0]) == 16


@pytest.mark.parametrize("fuse", [True, False])
def test_kernels_have_other_gates_scaled_embeddings_and_capped_logits(directory: Path, fuse: bool) -> None:
    """Each where its operation is computed anyway: the same launches as without them."""
    found = []
    for changes in ({}, {"ffn": GELU, "embedding_scale": 2.0, "logit_softcap": 30.0}):
        pair = Pair(directory, fuse=fuse)
        pair.target = replace(pair.target, config=with_changes(pair.target.config, **changes))
        lowered = pair.lower(depth=0, batch=1)
        found.append([group.name for group in lowered.groups])
        names = [call.kernel.name for call in lowered.calls]
    assert found[0] == found[1]
    assert all(any(part in name for name in names) for part in ("gelu_tanh", "scale2.0", "cap30.0"))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_kernels_gate_attention_turn_a_part_of_heads_and_take_wide_norms(
    directory: Path, rows: int, wide: bool
) -> None:
    """The gate is an epilogue of its GEMM; a rotation of a part of heads is a launch of its own, with the KV write."""
    pair = Pair(directory)
    config = with_changes(pair.target.config, gated=True, head_dim=256, rotary_dims=64)
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in weight_plan(config).items()}
    shape = (config.attentions[0].query_size, config.hidden_size)
    weights |= {f"layers.{layer}.gate.weight": torch.zeros(shape).bfloat16() for layer in range(len(config.layers))}
    if wide:
        weights = {name: each.float() if name.endswith("norm.weight") else each for name, each in weights.items()}
    pair.target = replace(pair.target, config=config, weights=weights)
    groups = [group.name for group in pair.lower(depth=0, batch=rows).groups]
    assert groups.count("gemm+output_gate") == groups.count("rope+kv_write") == len(config.layers)
    assert "gemm+rope+kv_write" not in groups


@pytest.mark.parametrize("fuse", [True, False])
def test_a_norm_of_what_is_added_and_its_scale_are_both_applied(directory: Path, fuse: bool) -> None:
    """Halves are exact: the tokens and logprobs are those of norms with half the weights."""
    pair = Pair(directory, fuse=fuse)
    plain = pair.target
    names = [f"layers.{layer}.{norm}_norm.weight" for layer in range(2) for norm in ("post_attn", "post_ffn")]
    generator = torch.Generator().manual_seed(0)
    norms = {name: (torch.rand(64, generator=generator) + 0.5).bfloat16() for name in names}
    halved = {name: each / 2 for name, each in norms.items()}
    numbers = {f"layers.{layer}.sum_scale": torch.tensor([0.5]) for layer in range(2)}
    found = []
    for scale, weights in ((0.5, norms | numbers), (None, halved), (None, norms)):
        layers = tuple(replace(layer, sandwich=True, sum_scale=scale) for layer in plain.config.layers)
        config = replace(plain.config, layers=layers)
        target = OpenedTarget(config, JoinedWeights(plain.weights, weights), directory)
        with Runtime.load(target, **{**OPTIONS, "dtype": "bfloat16"}) as runtime:
            runtime.submit([5, 6, 7], SamplingParams(max_tokens=8, logprobs=2))
            found.append([(each.token_ids, each.logprobs) for each in outputs_of(runtime)])
        if scale is not None:
            pair.target = replace(plain, config=config, weights={**plain.weights, **weights})
    ops = [op.kind for group in pair.lower(depth=0, batch=1).groups for op in group.ops]
    assert ops.count("scale") == 4
    assert found[0] == found[1] != found[2]
