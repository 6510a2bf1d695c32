"""EAGLE3 draft models of other forms: several layers, windows, other features; from each producer's own files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import draft_tensors, edit_json, target_geometry, write_draft_layout
from safetensors.torch import load_file, save_file

from lowlat import SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.speculators.draft_files.windows import effective_window
from lowlat.speculators.eagle3.config import read_draft_config
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.eagle3.weights import draft_weight_plan, load_draft_model
from lowlat.speculators.methods import draft_method, load_speculator, plan_speculator
from lowlat.speculators.peagle.config import PEAGLE
from lowlat.speculators.peagle.geometry import PeagleConfig

TARGET = target_geometry()
FULL, SLIDING = "full_attention", "sliding_attention"


def tensors_of(num_layers: int, num_features: int = 3, read: int = 16) -> dict[str, torch.Tensor]:
    """A draft model's tensors; layers after the first read `read` columns."""
    tensors = draft_tensors(num_features)
    for layer in range(1, num_layers):
        for name, tensor in list(tensors.items()):
            if name.startswith("layers.0.") and "hidden_norm" not in name:
                columns = (read,) if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else ()
                shape = (*tensor.shape[: tensor.dim() - len(columns)], *columns)
                tensors[name.replace("layers.0.", f"layers.{layer}.")] = torch.randn(shape)
    return tensors


def refused(directory: Path, *parts: str, target: Any = TARGET, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_draft_model(directory, target, **options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def write_deepspec(directory: Path, ids: Any = (1, 2, 3, 5, 6), layers: int = 1, **changes: Any) -> None:
    """A draft model as DeepSpec saves it: the target's config with the draft model's keys, and copies of its tables."""
    tensors = {**tensors_of(layers, 5, 32), "embed_tokens.weight": torch.randn(40, 16)}
    tensors |= {"lm_head.weight": torch.randn(40, 16)}
    tensors |= {f"layers.0.self_attn.{part}_norm.weight": torch.randn(6) for part in "qk"}
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    write_draft_layout(directory, "speculators", kept)
    path = directory / "config.json"
    own = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "num_hidden_layers": layers, "ttt_length": 7}
    own |= {"num_target_layers": 8, "target_model_name_or_path": "Qwen/Qwen3-4B", "step_loss_decay": 0.8}
    own |= {"target_layer_ids": list(ids), "draft_num_hidden_layers": layers, "tie_word_embeddings": False}
    own |= {"layer_types": [FULL] * layers, "use_sliding_window": False, "sliding_window": None, "dtype": "bfloat16"}
    layer = json.loads(path.read_text())["transformer_layer_config"]
    path.write_text(json.dumps({**layer, **own, **changes}))


def test_deepspec_s_five_layers_are_outputs(tmp_path: Path) -> None:
    write_deepspec(tmp_path)
    loaded = load_draft_model(tmp_path, TARGET)
    config = loaded.config
    assert (config.layout, config.capture_boundaries) == ("deepspec", (2, 3, 4, 6, 7))
    assert config.attention.qk_norm and config.own_embedding and config.own_lm_head and not config.own_draft_map
    assert not (config.norm_output or config.norm_before_residual or config.fc_norm) and loaded.notes == ()
    assert loaded.weights["draft_model.fc.weight"].shape == (16, 80)
    assert read_draft_config(tmp_path, TARGET, capture_layers=(0, 1, 2, 3, 8)).capture_boundaries == (0, 1, 2, 3, 8)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"ids": (1, 2, 3, 5, 7)}, ["layer 7 is the target's last", "give capture_layers"]),
        ({"ids": (1, 2, 3)}, ["target_layer_ids = [2, 3, 4]: expected 5 entries"]),
        ({"ids": (3, 2, 1, 5, 6)}, ["expected ascending ids"]),
        ({"ids": (1, 2, 3, 5, 8)}, ["integers from 0 to 7"]),
        ({"num_target_layers": 9}, ["num_target_layers 9 is not the target's 8"]),
        ({"layers": 2}, ["num_hidden_layers = 2", "DeepSpec's draft models of one layer"]),
        ({"architectures": ["Gemma3Eagle3Model"]}, ["'Gemma3Eagle3Model' is not implemented"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 5, 6]}, ["means boundaries", "means [2, 3, 4, 6, 7]"]),
    ],
)
def test_deepspec_s_that_are_refused(changes: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    write_deepspec(tmp_path, **changes)
    refused(tmp_path, *parts)


def write_parallel(
    directory: Path, layout: str = "speculators", shape: Any = (1, 1, 48), **config: Any
) -> torch.Tensor:
    """A P-EAGLE draft model of four layers; `config` changes keys of the top level. Returns its mask's features."""
    tensors = {**tensors_of(4), "mask_hidden": torch.randn(shape)}
    own = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]} if layout == "speculators" else {}
    write_draft_layout(directory, layout, tensors, layer={"num_hidden_layers": 4}, config={**own, **config})
    return tensors["mask_hidden"]


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("speculators", {"mask_token_id": 39}),
        ("speculators", {"ptd_token_id": 39, "para_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.1}),
        ("modelopt", {"pard_token": 39, "mask_token_id": 39, "max_seq_len": 2048, "prediction_loss_weight": 1.0}),
    ],
)
def test_p_eagle_s_mask_stands_in_for_tokens_and_features(layout: str, config: dict[str, Any], tmp_path: Path) -> None:
    hidden = write_parallel(tmp_path, layout, **config)
    assert draft_method(tmp_path) == "peagle"
    options = SpeculativeConfig(method="peagle", model=tmp_path)
    loaded = load_speculator(options, TARGET)
    draft = loaded.speculator.draft_config
    assert isinstance(draft, PeagleConfig) and (draft.mask_token, draft.num_layers, draft.method) == (39, 4, "peagle")
    state = loaded.weights["draft_model.mask_state"]
    assert torch.allclose(state, loaded.weights["draft_model.fc.weight"] @ hidden.reshape(-1), rtol=1e-4, atol=1e-5)
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert dict(loaded.speculator.weight_plan("float32")) == held
    assert plan_speculator(options, TARGET) == loaded.speculator
    refused(tmp_path, "'mask_hidden': this is a P-EAGLE draft model; method must be 'peagle'")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["mask_token_id is missing; a P-EAGLE draft model needs it"]),
        ({"mask_token_id": 40}, ["mask_token_id", "0 to 39"]),
        ({"mask_token_id": 3, "pard_token": 4}, ["contradictory: mask_token_id 3, pard_token 4"]),
        ({"mask_token_id": 3, "shape": (1, 1, 32)}, ["'mask_hidden': expected shape [1, 1, 48], found [1, 1, 32]"]),
        ({"mask_token_id": 3, "shape": (48, 1)}, ["'mask_hidden': expected shape [1, 1, 48], found [48, 1]"]),
        ({"mask_token_id": 3, "speculators_model_type": "eagle3"}, ["is 'eagle3', but tensor 'mask_hidden' is there"]),
    ],
)
def test_p_eagle_s_that_are_refused(changes: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    write_parallel(tmp_path, **changes)
    refused(tmp_path, *parts, kind=PEAGLE)


def test_p_eagle_s_kind_is_in_tensors_and_config(tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "speculators")
    refused(tmp_path, "'mask_hidden' is missing: this is no P-EAGLE draft model; method must be 'eagle3'", kind=PEAGLE)
    assert draft_method(tmp_path) == "eagle3"
    edit_json(tmp_path / "config.json", speculators_model_type="peagle")
    refused(tmp_path, "is 'peagle', but tensor 'mask_hidden' is missing")


@pytest.mark.parametrize("layout", ["speculators", "modelopt", "numbered midlayers"])
def test_layers_of_every_layout(layout: str, tmp_path: Path) -> None:
    """ModelOpt numbers `midlayer`, and calls a later layer's first norm what it calls the first layer's."""
    tensors = tensors_of(3)
    numbered = layout == "numbered midlayers"
    write_draft_layout(tmp_path, "modelopt" if numbered else layout, tensors, layer={"num_hidden_layers": 3})
    if numbered:
        stored = load_file(tmp_path / "model.safetensors")
        for name in [name for name in stored if name.startswith("layers.")]:
            layer, part = name.split(".", 2)[1:]
            part = "hidden_norm.weight" if int(layer) and part == "input_layernorm.weight" else part
            stored[f"midlayer.{layer}.{part}"] = stored.pop(name)
        save_file(stored, tmp_path / "model.safetensors")
        edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLMEagle3Deep"])
    loaded = load_draft_model(tmp_path, TARGET)
    assert loaded.config.num_layers == 3 and loaded.config.windows == (None, None, None)
    assert loaded.config.layout == ("modelopt" if numbered else layout)
    for number, name in enumerate(("draft_model", "draft_model.layers.1", "draft_model.layers.2")):
        own = f"layers.{number}"
        norm = "attn_norm" if number else "embed_norm"
        assert torch.equal(loaded.weights[f"{name}.{norm}.weight"], tensors[f"{own}.input_layernorm.weight"])
        for product in ("q", "kv") if number == 2 else ("qkv",):
            rows = torch.cat([tensors[f"{own}.self_attn.{part}_proj.weight"] for part in product])
            assert torch.equal(loaded.weights[f"{name}.{product}.weight"], rows)
        assert torch.equal(loaded.weights[f"{name}.down.weight"], tensors[f"{own}.mlp.down_proj.weight"])
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert dict(draft_weight_plan(loaded.config, dtype="float32")) == held


@pytest.mark.parametrize(
    ("stored", "stated", "parts"),
    [
        (tensors_of(2), 3, ["'layers.2.input_layernorm.weight' is missing"]),
        (tensors_of(3), 2, ["is of draft layer 2", "num_hidden_layers is 2"]),
        (tensors_of(2, read=32), 2, ["has 32 columns", "whose later layers read the embedding"]),
        (tensors_of(1), 17, ["num_hidden_layers must be an integer from 1 to 16"]),
    ],
)
def test_layers_that_do_not_fit(stored: Any, stated: int, parts: list[str], tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "modelopt", stored, layer={"num_hidden_layers": stated})
    refused(tmp_path, *parts)


@pytest.mark.parametrize(
    ("layer", "windows", "note"),
    [
        ({"layer_types": [FULL, SLIDING], "sliding_window": 512, "use_sliding_window": True}, (None, 512), None),
        ({"layer_types": [SLIDING, SLIDING], "sliding_window": 64}, (64, 64), None),
        ({"layer_types": [FULL] * 36, "sliding_window": 64}, (None, None), None),
        ({"sliding_window": 512}, (512, 512), "for every layer"),
        ({"sliding_window": 512, "use_sliding_window": False}, (None, None), None),  # as SpecForge has it
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}, (None, 512), None),
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 28}, (None, None), "no layer"),
        ({"sliding_window": 4096, "model_type": "qwen3"}, (None, None), None),
        ({"sliding_window": 4096, "model_type": "mistral"}, (4096, 4096), None),
    ],
)
def test_windows(layer: dict[str, Any], windows: tuple[Any, ...], note: str | None, tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "speculators", tensors_of(2), layer={"num_hidden_layers": 2, **layer})
    loaded = load_draft_model(tmp_path, TARGET)
    assert loaded.config.windows == windows
    assert [note in text for text in loaded.notes] == ([True] if note else [])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"layer_types": [SLIDING]}, ["layer_types has 1 entries for 2 draft layers"]),
        ({"layer_types": [SLIDING, FULL]}, ["sliding_window is missing"]),
        ({"use_sliding_window": True}, ["sliding_window is missing"]),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": False}, ["use_sliding_window is"]),
        ({"layer_types": [FULL, "chunked_attention"]}, ["'chunked_attention' is not implemented"]),
    ],
)
def test_windows_that_cannot_be(layer: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "speculators", tensors_of(2), layer={"num_hidden_layers": 2, **layer})
    refused(tmp_path, *parts)


def test_the_smaller_of_two_windows_holds(tmp_path: Path) -> None:
    given = [(None, None), (None, 8), (512, None), (512, 8), (8, 512)]
    assert [effective_window(*each) for each in given] == [(None, 0), (8, 4), (512, 0), (8, 0), (8, 0)]
    layers = {"num_hidden_layers": 2, "sliding_window": 16, "layer_types": [FULL, SLIDING]}
    write_draft_layout(tmp_path, "speculators", tensors_of(2), layer=layers)
    options = SpeculativeConfig(model=tmp_path, draft_window=8)
    for make in (Eagle3Speculator.plan, Eagle3Speculator.load):
        with pytest.raises(ConfigError, match=r"draft_window 8 .* of 2 layers of which layer 0 has no window"):
            make(options, TARGET)
    edit_json(tmp_path / "config.json", transformer_layer_config={**_layer(tmp_path), "layer_types": [SLIDING, FULL]})
    speculator = Eagle3Speculator.plan(options, TARGET)
    assert speculator.config.windows == (16, None) and not speculator.attends_everything
    assert speculator.report()["draft_layers"] == 2


def _layer(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())["transformer_layer_config"]
    return found


def test_a_draft_model_without_features_reads_the_final_hidden_state(tmp_path: Path) -> None:
    tensors = draft_tensors()
    eagle = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    write_draft_layout(tmp_path, "modelopt", tensors, eagle=eagle)
    loaded = load_draft_model(tmp_path, TARGET)
    assert loaded.config.final_hidden and loaded.config.capture_boundaries == (8,)
    assert "draft_model.fc.weight" not in loaded.weights and "fc.weight is not used" in loaded.notes[0]
    del tensors["fc.weight"]
    write_draft_layout(tmp_path, "modelopt", tensors, eagle=eagle)
    assert load_draft_model(tmp_path, TARGET).notes == ()
    assert read_draft_config(tmp_path, TARGET, capture_layers=(7,)).capture_boundaries == (7,)
    refused(tmp_path, "capture_layers = [6, 7]: expected 1 entries", capture_layers=(6, 7))
    refused(
        tmp_path, "hidden_size 16 is not the target's 20, whose final hidden", target=target_geometry(hidden_size=20)
    )
    write_draft_layout(tmp_path, "modelopt", tensors, eagle=eagle, config={"use_aux_hidden_state": True})
    refused(tmp_path, "use_aux_hidden_state is contradictory")
    write_draft_layout(tmp_path, "modelopt", {**tensors, "input_norm.weight": torch.ones(48)}, eagle=eagle)
    refused(tmp_path, "use_aux_hidden_state is false, but there are norms before fc")


def test_eagle_3_1_as_its_producers_write_it(tmp_path: Path) -> None:
    """speculators', of four features and two layers; SpecForge's is in the tests of what is fed back."""
    tensors = {**tensors_of(2, 4), **{f"fc_norm.{k}.weight": torch.randn(16) for k in range(4)}}
    flags = {"fc_norm": True, "norm_output": True, "norm_before_fc": False}
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}
    write_draft_layout(tmp_path, "speculators", tensors, config={**flags, **ids}, layer={"num_hidden_layers": 2})
    config = load_draft_model(tmp_path, TARGET).config
    assert config.fc_norm and config.norm_output and not config.norm_before_fc
    assert (config.num_layers, config.capture_boundaries) == (2, (2, 4, 5, 8))
