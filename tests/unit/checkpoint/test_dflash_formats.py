"""DFlash and DSpark draft models from every layout's files: what is read, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_json
from safetensors.torch import load_file, save_file
from tiny_dflash import MASK, dflash_draft_model
from tiny_gemma_drafts import gemma_draft_model
from tiny_models import make_target

from lowlat import SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.models.target import read_model_config
from lowlat.speculators.dflash.geometry import DflashConfig
from lowlat.speculators.dflash.weights import load_dflash
from lowlat.speculators.dspark.geometry import DsparkConfig
from lowlat.speculators.dspark.weights import load_dspark
from lowlat.speculators.methods import draft_method, load_speculator, plan_speculator

LAYOUTS = ("z-lab", "speculators")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A target of three layers, and its geometry."""
    directory = tmp_path_factory.mktemp("target")
    return make_target(directory, "qwen3"), read_model_config(directory)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_geometry_and_weights_of_every_layout(layout: str, target: tuple[Any, Any], tmp_path: Path) -> None:
    flags: dict[str, Any] = {"draft_vocab_size": 40, "own_lm_head": True, "attention_bias": True, "block_size": 5}
    _, tensors = dflash_draft_model(tmp_path, target[0], layout=layout, **flags)
    options = SpeculativeConfig(method=draft_method(tmp_path), model=tmp_path, num_speculative_tokens=4)
    loaded = load_speculator(options, target[1])
    draft = loaded.speculator.draft_config
    assert isinstance(draft, DflashConfig) and (draft.method, draft.layout, draft.mask_token) == (
        "dflash",
        layout,
        MASK,
    )
    assert (draft.capture_boundaries, draft.block_size, draft.num_layers) == ((1, 2), 5, 2)
    attention = draft.attention
    assert attention.qk_norm and attention.qkv_bias and not attention.output_bias and not draft.own_embedding
    for kind in ("weight", "bias"):
        parts = [[tensors[f"layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"] for layer in (0, 1)]
        assert torch.equal(loaded.weights[f"draft_model.layers.1.qkv.{kind}"], torch.cat(parts[1]))
        assert torch.equal(loaded.weights[f"draft_model.context.kv.{kind}"], torch.cat([*parts[0][1:], *parts[1][1:]]))
    ids = torch.arange(40) + tensors["d2t"]
    assert loaded.weights["draft_model.draft_to_target"].tolist() == ids.tolist()
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert dict(loaded.speculator.weight_plan("float32")) == held
    assert plan_speculator(options, target[1]) == loaded.speculator
    with pytest.raises(ConfigError, match="num_speculative_tokens 5 is more than the 4 drafts"):
        plan_speculator(SpeculativeConfig(method="dflash", model=tmp_path, num_speculative_tokens=5), target[1])


def test_places_and_names_that_differ(target: tuple[Any, Any], tmp_path: Path) -> None:
    """Newer files name the block inside; without ids z-lab's are spread evenly; names may begin with `model.`."""
    dflash_draft_model(tmp_path, target[0], captures=(2,), num_hidden_layers=1)
    edit_json(tmp_path / "config.json", block_size=..., dflash_config={"mask_token_id": MASK, "block_size": 6})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = load_dflash(tmp_path, target[1]).config
    assert (config.block_size, config.capture_boundaries) == (6, (2,))
    assert load_dflash(tmp_path, target[1], capture_layers=(3,)).config.capture_boundaries == (3,)


ZLAB: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
CONV = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTOR = {"selector_rank": 8, "selector_top_k": 4}


@pytest.mark.parametrize(
    ("layout", "changes", "parts"),
    [
        ("z-lab", {"architectures": ["DFlash2DraftModel"]}, ["conv_kernel_size is missing; a DFlash2"]),
        ("z-lab", {"dflash_config": {**ZLAB, **CONV, **SELECTOR}}, ["base_kernel' is missing"]),
        ("z-lab", {"dflash_config": {**ZLAB, **CONV}}, ["selector_rank is missing; a DFlash2"]),
        ("z-lab", {"dflash_config": {**ZLAB, **CONV, **SELECTOR, "conv_group_size": 5}}, ["5 does not divide"]),
        ("z-lab", {"dflash_config": {**ZLAB, "output_multiplier": 0.5}}, ["output_multiplier = 0.5"]),
        ("z-lab", {"dflash_config": ...}, ["dflash_config is missing: this is no DFlash draft model"]),
        ("z-lab", {"is_causal": False, "dflash_config": {**ZLAB, "causal": True}}, ["contradictory"]),
        ("z-lab", {"dflash_config": {**ZLAB, "projector_type": "domino"}}, ["projector_type = 'domino'"]),
        ("z-lab", {"dflash_config": {**ZLAB, "attention_mode": "mla"}}, ["attention_mode = 'mla'"]),
        ("z-lab", {"dflash_config": {**ZLAB, "target_layer_ids": [0, 2]}}, ["layer 2 is the target's last"]),
        ("z-lab", {"dflash_config": {**ZLAB, "target_layer_ids": [1]}}, ["expected 2 boundaries", "found [2]"]),
        ("z-lab", {"dflash_config": {"target_layer_ids": [0, 1]}}, ["mask_token_id is missing"]),
        ("z-lab", {"dflash_config": {**ZLAB, "block_size": 4}}, ["expected one block_size, found [4, 8]"]),
        ("z-lab", {"block_size": ...}, ["expected one block_size, found none"]),
        ("z-lab", {"layer_types": ["sliding_attention"] * 2}, ["sliding_window is missing"]),
        ("z-lab", {"layer_types": ["sliding_attention"], "sliding_window": 9}, ["has 1 entries for 2 draft layers"]),
        ("z-lab", {"num_target_layers": 36}, ["num_target_layers 36 is not the target's 3"]),
        ("z-lab", {"num_hidden_layers": 1}, ["of draft layer 1", "num_hidden_layers is 1"]),
        ("z-lab", {"num_hidden_layers": 3}, ["'layers.2.input_layernorm.weight' is missing"]),
        ("z-lab", {"vocab_size": 98}, ["vocab_size 98 is not the target's 97"]),
        ("z-lab", {"draft_vocab_size": 40}, ["draft_vocab_size 40 is not the 97 rows"]),
        ("z-lab", {"hidden_act": "relu"}, ["hidden_act = 'relu'"]),
        ("z-lab", {"odd": 1}, ["'odd' = 1"]),
        ("speculators", {"sample_from_anchor": 1}, ["sample_from_anchor must be true or false, found 1"]),
        ("speculators", {"speculators_model_type": "dspark"}, ["must be 'dflash', found 'dspark'"]),
        ("speculators", {"transformer_layer_config": ...}, ["transformer_layer_config is missing"]),
        ("speculators", {"aux_hidden_state_layer_ids": None}, ["aux_hidden_state_layer_ids is missing"]),
        ("speculators", {"target_hidden_size": 64}, ["target_hidden_size 64 is not the target's"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    layout: str, changes: dict[str, Any], parts: list[str], target: tuple[Any, Any], tmp_path: Path
) -> None:
    dflash_draft_model(tmp_path, target[0], layout=layout)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError) as caught:
        load_dflash(tmp_path, target[1])
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_layers_of_gemma_may_be_causal_in_the_block(target: tuple[Any, Any], tmp_path: Path) -> None:
    gemma_draft_model(tmp_path, target[0], block=True)
    assert load_dspark(tmp_path, target[1]).config.causal == (False,)
    edit_json(tmp_path / "config.json", is_causal=True)
    assert load_dspark(tmp_path, target[1]).config.causal == (True,)


DSPARK: dict[str, Any] = {"own_embedding": True, "own_lm_head": True, "markov_rank": 8, "block_size": 5}


@pytest.mark.parametrize(("layout", "kind"), [("deepspec", "vanilla"), ("speculators", "gated")])
def test_dspark_of_every_layout(layout: str, kind: str, target: tuple[Any, Any], tmp_path: Path) -> None:
    """A gate's projection is kept in two; boundary 0 is DeepSpec's id -1."""
    flags = {**DSPARK, "markov_head_type": kind, "captures": (0, 2)}
    _, tensors = dflash_draft_model(tmp_path, target[0], layout=layout, **flags)
    options = SpeculativeConfig(method=draft_method(tmp_path), model=tmp_path, num_speculative_tokens=5)
    loaded = load_speculator(options, target[1])
    draft = loaded.speculator.draft_config
    assert isinstance(draft, DsparkConfig) and draft.anchor_drafts
    assert (draft.method, draft.layout, draft.capture_boundaries) == ("dspark", layout, (0, 2))
    assert (draft.markov_rank, draft.markov_gated) == (8, kind == "gated")
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert dict(loaded.speculator.weight_plan("float32")) == held
    assert plan_speculator(options, target[1]) == loaded.speculator
    if kind == "gated":
        parts = [loaded.weights[f"draft_model.markov.{name}_gate.weight"] for name in ("state", "token")]
        assert torch.equal(torch.cat(parts, dim=1), tensors["markov_head.gate_proj.weight"])
    report = loaded.speculator.report()
    assert (report["markov_head"], report["confidence_head"], report["draft_block_size"]) == (kind, True, 5)
    with pytest.raises(ConfigError, match="num_speculative_tokens 6 is more than the 5 drafts"):
        plan_speculator(SpeculativeConfig(method="dspark", model=tmp_path, num_speculative_tokens=6), target[1])


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"markov_head_type": "rnn"}, ["markov_head_type = 'rnn'", "a bias by the token before alone"]),
        ({"markov_head_type": None}, ["markov_head_type is missing; a Markov head of rank 8"]),
        ({"markov_rank": None}, ["markov_rank"]),
        ({"markov_rank": 0}, ["confidence_head_with_markov is true, but markov_rank is 0"]),
        ({"markov_rank": 4}, ["markov_w1", "expected shape [97, 4]"]),
        ({"markov_head_type": "gated"}, ["'markov_head.gate_proj.weight' is missing"]),
        ({"enable_confidence_head": False}, ["unexpected tensor 'confidence_head.proj"]),
        ({"confidence_head_with_markov": False}, ["expected shape [1, 32]", "found [1, 40]"]),
        ({**CONV, **SELECTOR}, ["markov_rank and selector_rank are contradictory"]),
        ({"target_layer_ids": [0, -2]}, ["target_layer_ids"]),
        ({"target_layer_ids": None}, ["target_layer_ids is missing; a DSpark draft model"]),
        ({"architectures": ["Qwen3Model"]}, ["this is no DSpark draft model"]),
        ({"num_target_layers": 36}, ["num_target_layers 36 is not the target's 3"]),
    ],
)
def test_what_is_no_dspark_is_refused_by_name(
    changes: dict[str, Any], parts: list[str], target: tuple[Any, Any], tmp_path: Path
) -> None:
    dflash_draft_model(tmp_path, target[0], layout="deepspec", **DSPARK)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError) as caught:
        load_dspark(tmp_path, target[1])
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        ("fc.weight", None, ["'fc.weight' is missing: this is no DFlash draft model"]),
        ("hidden_norm.weight", None, ["'hidden_norm.weight' is missing"]),
        ("fc.weight", (32, 50), ["expected columns 1 to 8 times the target's hidden_size", "found [32, 50]"]),
        ("layers.0.mlp.up_proj.weight", (40, 31), ["expected shape [40, 32], found [40, 31]"]),
        ("markov_head.markov_w1.weight", (97, 4), ["unexpected tensor 'markov_head.markov_w1.weight'"]),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, shape: Any, parts: list[str], target: tuple[Any, Any], tmp_path: Path
) -> None:
    dflash_draft_model(tmp_path, target[0])
    tensors = {key: tensor for key, tensor in load_file(tmp_path / "model.safetensors").items() if key != name}
    save_file({**tensors, **({name: torch.ones(shape)} if shape else {})}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_dflash(tmp_path, target[1])
    for part in parts:
        assert part in str(caught.value), str(caught.value)
