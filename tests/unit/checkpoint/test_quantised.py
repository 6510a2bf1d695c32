"""Quantised linear layers: every layout becomes exactly the numbers that NumPy, or its own library, reads in it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import target_geometry, write_draft_layout
from quantised_layers import GPTQ, INT4, LAYOUTS, awq, compressed, fp8, gptq, nvfp4, quantise_target, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import make_target

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats import part_groups, read_quantisation
from lowlat.checkpoint.formats.quantisation import Names
from lowlat.checkpoint.recipes import Piece, Recipe, check_recipes
from lowlat.checkpoint.stored import StoredWeights
from lowlat.checkpoint.tensors import Checkpoint
from lowlat.errors import ConfigError
from lowlat.kernels.formats import matrix_format, matrix_parts
from lowlat.models.target import load_target, open_target, read_model_config

GOLDEN = Path(__file__).parents[2] / "data" / "quantised_layers.safetensors"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 1}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "iters": 200}
# spellings of tensors that other layouts have, too
SPELLINGS = {
    "autofp8-2024": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        partial(fp8, per="tensor"),
    ),
    "gptqmodel-5": (
        {**GPTQ, "format": "gptq", "checkpoint_format": "gptq", "pack_impl": "cpu"},
        partial(gptq, group=32, less=1, zero=8),
    ),
    "auto-round-gptq": (
        {**ROUND, "sym": True, "packing_format": "auto_round:auto_gptq"},
        partial(gptq, group=32, less=1, zero=8),
    ),
    "auto-round-awq": ({**ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}, partial(awq, group=32)),
}
HOSTILE = {"quant_method": "awq", "bits": 4, "group_size": 32}


def quantisation_of(config: dict[str, Any], directory: Path) -> Any:
    """The rules of one config."""
    return read_quantisation(Fields({"quantization_config": config}, "config.json"), directory)


def matrix(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A matrix in float32, whatever holds it."""
    parts = {part: weights[each] for part, each in matrix_parts(name, weights).items()}
    return matrix_format(parts).dequantise(parts, torch.float32)


def load_layer(directory: Path, config: dict[str, Any], rows: int, columns: int) -> torch.Tensor:
    """The layer "layer" of a directory as one canonical weight."""
    checkpoint = Checkpoint.open(directory)
    plain = Recipe("own.weight", (Piece("layer.weight", (rows, columns)),), torch.float32)
    quantisation = quantisation_of(config, directory).in_files(checkpoint.entries)
    recipes = quantisation.apply([plain])
    check_recipes(checkpoint, recipes, quantisation.unused(checkpoint))
    return matrix(StoredWeights(checkpoint, part_groups(recipes, {})).loaded(), "own.weight")


def golden() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]]:
    """Layers made by the formats' own libraries: config, tensors, and the numbers that the library reads in them.

    Made by compressed-tensors 0.20.0, AutoGPTQ 0.7.1, and AWQ's packing of optimum-quanto 0.2.7.
    """
    found = {}
    with safe_open(GOLDEN, "pt") as file:
        names = list(file.keys())
        for name, config in json.loads(file.metadata()["configs"]).items():
            own = [key for key in names if key.startswith(f"{name}.")]
            tensors = {f"layer.{key.removeprefix(f'{name}.')}": file.get_tensor(key) for key in own}
            found[name] = (config, tensors, file.get_tensor(f"expected.{name}"))
    return found


def test_layers_of_the_formats_own_libraries_mean_what_these_read(tmp_path: Path) -> None:
    layers = golden()
    assert {"fp8_block", "int4_64_zeros", "nvfp4", "awq", "gptq"} < set(layers)
    for name, (config, tensors, expected) in layers.items():
        directory = tmp_path / name
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
        found = load_layer(directory, config, *expected.shape)
        if name == "nvfp4":  # the library divides scales first, and rounds twice
            torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
        else:
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns"), [(48, 128), (264, 256)])
def test_every_layout_is_read_exactly(layout: str, rows: int, columns: int, tmp_path: Path) -> None:
    config, make = LAYOUTS[layout]
    tensors, values = make(np.random.default_rng(rows), rows, columns)
    save_file({f"layer.{name}": each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    assert np.array_equal(load_layer(tmp_path, config, rows, columns).numpy(), values)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_are_the_same_tensors(spelling: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole checkpoints, which say float16 as most of them do: the numbers are those of the layers, dequantised."""
    config, make = SPELLINGS[spelling]
    model = make_target(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, {"": make}, model, seed=3)
    path = tmp_path / "config.json"
    said = {**json.loads(path.read_text()), "quantization_config": config, "torch_dtype": "float16"}
    path.write_text(json.dumps({key: value for key, value in said.items() if key != "dtype"}))
    target = open_target(tmp_path)
    assert target.config.dtype == "bfloat16"
    (line,) = [record.message for record in caplog.records if "float16" in record.message]
    assert line.startswith(f"{tmp_path.name} is stored in float16") and "--dtype float32" in line
    weights = load_target(tmp_path, dtype="float32").weights
    own = model.model.layers[0]
    gates = torch.cat([own.mlp.gate_proj.weight, own.mlp.up_proj.weight])
    assert torch.equal(matrix(weights, "layers.0.o.weight"), own.self_attn.o_proj.weight)
    assert torch.equal(matrix(weights, "layers.0.gate_up.weight"), gates)
    assert len([record for record in caplog.records if "float16" in record.message]) == 1  # none where it was asked for


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_layers_keep_scales_of_their_own(family: str, tmp_path: Path) -> None:
    model = make_target(tmp_path, family, **SIZES)
    layout = {"llama": "fp8-tensor", "mistral": "awq", "qwen2": "fp8-block", "qwen3": "nvfp4"}[family]
    quantise_target(tmp_path, layout, model)
    weights, own = load_target(tmp_path).weights, model.model.layers[0]
    attention, ffn = own.self_attn, own.mlp
    expected = {
        "qkv": torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        "o": attention.o_proj.weight,
        "gate_up": torch.cat([ffn.gate_proj.weight, ffn.up_proj.weight]),
        "down": ffn.down_proj.weight,
    }
    for name, values in expected.items():
        assert torch.equal(matrix(weights, f"layers.0.{name}.weight"), values), name
    assert torch.equal(weights["lm_head.weight"], model.lm_head.weight)


def mixed_config(kind: str) -> dict[str, Any]:
    """FP8 attention next to an FFN in NVFP4 whose down projection stays plain, in two spellings."""
    if kind == "modelopt":
        names = {"self_attn": "FP8", "gate_proj": "NVFP4", "up_proj": "NVFP4"}
        layers = {f"model.layers.0.*{name}*": {"quant_algo": algorithm} for name, algorithm in names.items()}
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    first = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
    other = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    groups = {
        "a": {**first["config_groups"]["group_0"], "format": "float-quantized", "targets": ["re:.*self_attn.*"]},
        "b": {**other["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"},
    }
    return {**first, "format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head", "re:.*down_proj$"]}


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_layers_of_one_model_are_stored_in_several_formats(kind: str, tmp_path: Path) -> None:
    model = make_target(tmp_path, "llama", **SIZES)
    names = ("weight", "weight_scale_2") if kind == "modelopt" else ("weight_packed", "weight_global_scale")
    makers = {"self_attn": partial(fp8, per="tensor"), "mlp": partial(nvfp4, names=names, divides=kind != "modelopt")}
    rewrite(tmp_path, makers, model, seed=1, plain=("down_proj",))
    path, config = tmp_path / "config.json", mixed_config(kind)
    fields = json.loads(path.read_text())
    if kind == "modelopt":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": config}))
    else:
        path.write_text(json.dumps({**fields, "quantization_config": config}))
    weights, own = load_target(tmp_path).weights, model.model.layers[0]
    assert {"layers.0.qkv.fp8", "layers.0.gate_up.nvfp4", "layers.0.down.weight"} < set(weights)
    assert torch.equal(matrix(weights, "layers.0.o.weight"), own.self_attn.o_proj.weight)
    assert torch.equal(matrix(weights, "layers.0.gate_up.weight")[128:], own.mlp.up_proj.weight)


def test_a_draft_model_is_quantised_as_a_target_is(tmp_path: Path) -> None:
    from lowlat.speculators.eagle3.weights import load_draft_model

    write_draft_layout(tmp_path, "safeai")
    plain = load_draft_model(tmp_path, target_geometry()).weights
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name, stored in list(tensors.items()):
        if "proj" in name:
            parts, values = fp8(np.random.default_rng(len(name)), stored.shape[0], stored.shape[1], "channel")
            tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
            expected[name] = torch.from_numpy(values)
    save_file(tensors, tmp_path / "model.safetensors")
    config = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    config["ignore"] = ["lm_head", "fc"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    weights = load_draft_model(tmp_path, target_geometry()).weights
    assert "draft_model.down.fp8" in weights and torch.equal(
        weights["draft_model.fc.weight"], plain["draft_model.fc.weight"]
    )
    down = next(values for name, values in expected.items() if "down_proj" in name)
    assert torch.equal(matrix(weights, "draft_model.down.weight"), down)


def with_group(**weights: Any) -> dict[str, Any]:
    """A config of W4A16 with other arguments of weights."""
    return compressed("pack-quantized", **{**INT4, "group_size": 32, **weights})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not implemented"),
    "bits": (HOSTILE | {"bits": 8}, "bits = 8 is not implemented"),
    "group": (HOSTILE | {"group_size": 16}, "group_size must be one of 32, 64, 128, found 16"),
    "gemv": (HOSTILE | {"version": "gemv"}, "version must be 'gemm'"),
    "no zeros": (HOSTILE | {"zero_point": 0}, "zero_point must be true or false"),
    "order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, "desc_act"),
    "dynamic": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"x": {}}},
        "dynamic 'x' is not implemented",
    ),
    "marlin": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
        "checkpoint_format",
    ),
    "block": ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"weight_block_size must be \[128, 128\]"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt = 'e5m2'"),
    "algorithm": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not implemented"),
    "int8": (compressed("int-quantized", num_bits=8, type="int"), "format 'int-quantized' is not implemented"),
    "actorder": (with_group(actorder="group"), "actorder = 'group' is not implemented"),
    "strategy": (with_group(strategy="channel"), "strategy must be 'group'"),
    "sparse": (
        with_group() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config .* not implemented",
    ),
    "transform": (with_group() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config .*"),
    "expression": (with_group() | {"ignore": ["re:(a+)+$"]}, "expression 're:.* is not implemented"),
    "repeats": (with_group() | {"ignore": ["re:.*.*.*.*.*x"]}, "at most 4 plain repeats"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        quantisation_of(config, tmp_path)


def test_names_of_modules_are_whole_parts_expressions_or_wildcards() -> None:
    module = "model.layers.1.self_attn.q_proj"
    matching = (
        "Linear",
        module,
        "q_proj",
        "layers.1",
        "re:.*self_attn.*",
        r"re:model\.layers\.\d+\..*",
        "*.q_proj",
        "model.*",
    )
    for name in matching:
        assert Names.parse("config", [name]).match(module), name
    for name in ("layers.10", "q", "proj", "re:self_attn", "*.k_proj", "Conv"):
        assert not Names.parse("config", [name]).match(module), name


def test_layers_that_their_format_cannot_hold_are_refused_from_the_config_alone(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", hidden_size=32, intermediate_size=48)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "quantization_config": with_group()}))
    with pytest.raises(ConfigError, match=r"mlp\.down_proj has 48 inputs; int4_32 needs a multiple of 32"):
        read_model_config(tmp_path)
    ignored = with_group() | {"ignore": ["lm_head", "down_proj", "k_proj"]}
    path.write_text(json.dumps({**fields, "quantization_config": ignored}))
    with pytest.raises(ConfigError, match=r"must be stored alike, found .*q_proj: int4_32, .*k_proj: plain"):
        read_model_config(tmp_path)


def damaged(layout: str, tensors: dict[str, torch.Tensor]) -> str:
    """Damage one tensor of a layer; what the error says of it."""
    if layout == "fp8-channel":
        tensors["weight"].view(torch.uint8)[3, 5] = 255
        return "expected e4m3 numbers, found NaN"
    if layout == "w4a16-32":
        tensors["weight_shape"][1] += 8
        return r"weight_shape is \[48, 136\]"
    if layout == "gptq-v1":
        tensors["g_idx"][0] = 1
        return "activation order is not implemented"
    if layout == "awq":
        tensors["scales"][0, 0] = float("inf")
        return "expected finite values"
    tensors["weight_global_scale"].zero_()
    return "expected a number above 0"


@pytest.mark.parametrize("layout", ["fp8-channel", "w4a16-32", "gptq-v1", "awq", "nvfp4"])
def test_values_that_cannot_be_meant_are_refused(layout: str, tmp_path: Path) -> None:
    config, make = LAYOUTS[layout]
    tensors, _ = make(np.random.default_rng(0), 48, 128)
    message = damaged(layout, tensors)
    save_file({f"layer.{name}": each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor 'layer\..*{message}"):
        load_layer(tmp_path, config, 48, 128)


def test_biases_of_zeros_that_gptq_files_have_besides_are_passed_over(tmp_path: Path) -> None:
    model = make_target(tmp_path, "qwen2", **SIZES)
    quantise_target(tmp_path, "gptq-v1", model)
    path = tmp_path / "model.safetensors"
    tensors, bias = load_file(path), "model.layers.0.mlp.down_proj.bias"
    expected = load_target(tmp_path).weights
    save_file(tensors | {bias: torch.zeros(64)}, path)
    found = load_target(tmp_path).weights
    assert found.keys() == expected.keys() and "layers.0.qkv.bias" in found
    assert all(torch.equal(each, expected[name]) for name, each in found.items())
    save_file(tensors | {bias: torch.ones(64)}, path)
    with pytest.raises(ConfigError, match=f"unexpected tensor '{bias}'"):
        open_target(tmp_path)


def test_a_missing_tensor_is_named_before_anything_is_read(tmp_path: Path) -> None:
    model = make_target(tmp_path, "llama", **SIZES)
    config, _ = LAYOUTS["awq"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    assert model.config.hidden_size == 64
    with pytest.raises(ConfigError, match=r"tensor 'model\.layers\.0\.self_attn\.q_proj\.qweight' is missing"):
        open_target(tmp_path)
