"""Quantised Gemmas: logits are those of the numbers that their files hold, whatever stays plain next to them."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import edit_json
from parity import check_parity
from quantised_layers import quantise_target
from recording import prompt_of
from safetensors.torch import load_file, save_file
from stages import later, wide
from tiny_gemma import E4B, GEMMA_3_27B, GEMMA_31B, MOE
from tiny_models import make_target
from unit.test_quantised_targets import OPTIONS

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "global_head_dim": 32}
SMALL = {
    **E4B,
    **SIZES,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 97,
    "num_hidden_layers": 4,
} | {"layer_types": E4B["layer_types"][:4]}
EMBEDDINGS = ("embed_tokens", "per_layer_model_projection")
PER_LAYER = ("per_layer_input_gate", "per_layer_projection")
ROUTER = (".router.",)
TARGETS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # family, fields, and what files leave plain
    "27b": ("gemma3_text", {**GEMMA_3_27B, **{k: v for k, v in SIZES.items() if k != "global_head_dim"}}, ()),
    "31b": ("gemma4_text", {**GEMMA_31B, **SIZES}, ()),
    "26b": ("gemma4_text", {**MOE, **SIZES, "moe_intermediate_size": 64}, ROUTER),
    "e4b": ("gemma4_text", SMALL, EMBEDDINGS),
    "e4b-gates": ("gemma4_text", SMALL, (*EMBEDDINGS, *PER_LAYER)),
}


def apart(directory: Path, count: int) -> None:
    """Experts one by one, each a linear layer, as quantised files have them."""
    file, tensors = directory / "model.safetensors", {}
    for name, stored in load_file(directory / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = stored
            continue
        owner, _, part = name.rpartition(".")
        for expert in range(count):
            pieces = dict.fromkeys([part], stored[expert])
            if part == "gate_up_proj":
                pieces = dict(zip(("gate_proj", "up_proj"), stored[expert].chunk(2), strict=True))
            tensors |= {f"{owner}.{expert}.{piece}.weight": each.clone() for piece, each in pieces.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def into_wrapper(directory: Path, model_type: str) -> None:
    """The text model's files as those of the model that sees: nested config, names with its beginning."""
    path, file = directory / "config.json", directory / "model.safetensors"
    config = json.loads(path.read_text())
    outer = {key: config.pop(key) for key in ("quantization_config",)}
    outer["quantization_config"] = json.loads(json.dumps(outer["quantization_config"]).replace(
        "model.layers", "model.language_model.layers"
    ))  # fmt: skip
    path.write_text(json.dumps({**outer, "model_type": model_type, "text_config": config, "vision_config": {}}))
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "layout", "wrapped"),
    [
        *(
            ("31b", "fp8-block", False),
            ("31b", "nvfp4", True),
            ("26b", "fp8-channel", True),
            ("e4b", "w4a16-32", False),
        ),
        *(wide("31b", "fp8-channel", False), later("31b", "awq", True), wide("31b", "gptq-v1", False)),
        *(wide("27b", "awq", False), later("27b", "nvfp4-modelopt", False), later("26b", "nvfp4", True)),
        *(wide("26b", "w4a16-32", False), later("e4b-gates", "fp8-block", True), wide("e4b", "awq", False)),
        wide("26b", "gptq-symmetric", False),
    ],
)
def test_logits_are_those_of_the_dequantised_model(name: str, layout: str, wrapped: bool, tmp_path: Path) -> None:
    """Full layers have no values of their own; embeddings by layer and routers are plain; names as the makers' are."""
    family, fields, plain = TARGETS[name]
    model = make_target(tmp_path, family, **fields)
    if fields.get("enable_moe_block"):
        apart(tmp_path, fields["num_experts"])
    quantise_target(tmp_path, layout, model, plain=plain)
    leave_plain(tmp_path, plain)
    if wrapped:
        into_wrapper(tmp_path, "gemma4")
    check_parity(tmp_path, model, prompt_of(21), 12, **OPTIONS)


def leave_plain(directory: Path, plain: tuple[str, ...]) -> None:
    """Name what is plain in quantization_config, as each maker does; and modules that this model has not."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    parts = [part.strip(".") for part in (*plain, "vision_tower")]
    keys: dict[str, dict[str, Any]] = {
        "compressed-tensors": {"ignore": ["lm_head", *(f"re:.*{part}.*" for part in parts)]},
        "modelopt": {"exclude_modules": ["lm_head", *(f"*{part}*" for part in parts)]},
        "gptq": {"dynamic": {f"-:.*{part}.*": {} for part in parts}},
    }
    own = keys.get(config["quant_method"], {"modules_to_not_convert": parts})
    edit_json(directory / "config.json", quantization_config={**config, **own})
