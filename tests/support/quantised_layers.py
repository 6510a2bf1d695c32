"""Quantised linear layers drawn and read by plain NumPy, as their specifications have them, and checkpoints of them.

`LAYOUTS` names every public layout; `write_layer` draws a random layer in one and says which numbers it holds.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from lowlat.kernels.formats import MATRIX_FORMATS

Layer = tuple[dict[str, torch.Tensor], np.ndarray]  # tensors by their last names, and the numbers [N, K] float32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Numbers of e4m3 codes: a sign, four bits of exponent, three of mantissa."""
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    plain = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7.0))
    return np.where(codes & 128, -plain, plain).astype(np.float32)


def words(numbers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers along an axis in an int32, place i of the word holding number order[i] of the eight."""
    numbers = np.moveaxis(numbers, axis, -1)
    extra = -numbers.shape[-1] % 8
    eights = np.pad(numbers, [(0, 0), (0, extra)]).reshape(numbers.shape[0], -1, 8).astype(np.uint32)
    packed = np.zeros(eights.shape[:-1], np.uint32)
    for place, column in enumerate(order):
        packed |= eights[..., column] << np.uint32(4 * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, axis)))


def floats(values: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of numbers."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def fp8(rng: np.random.Generator, rows: int, columns: int, per: str, name: str = "weight_scale") -> Layer:
    """e4m3 numbers with a scale for the tensor, for each row or for blocks of 128 by 128."""
    codes = rng.integers(0, 127, (rows, columns), dtype=np.uint8) | (rng.integers(0, 2, (rows, columns), np.uint8) << 7)
    shape = {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[per]
    scales = (rng.random(shape, np.float32) + 0.5) / 128 / columns**0.5
    wide = np.broadcast_to(scales, shape)
    if per == "block":
        wide = scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    stored = floats(scales.reshape(1) if per == "tensor" else scales)
    return {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), name: stored}, e4m3(codes) * wide


def static(parts: dict[str, torch.Tensor], values: np.ndarray) -> Layer:
    """The same with a scale of activations next to its own, both of no dimension, as Ministral 3's files have them."""
    flat = {"weight_scale_inv": parts["weight_scale_inv"].reshape(()), "activation_scale": torch.tensor(0.3)}
    return parts | flat, values


@dataclass(frozen=True)
class Drawn:
    """Random codes, zero points and scales of groups of inputs, and the numbers that they stand for."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    values: np.ndarray


def draw(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    group: int,
    zero: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Drawn:
    """A layer of INT4; zero: the zero point of all groups; dtype: of the scales, which come as float32.

    Drawn zero points double a weight's variance: smaller scales keep such layers from amplifying roundings.
    """
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    zeros = rng.integers(0, 16, (rows, columns // group), dtype=np.uint8)
    if zero is not None:
        zeros[:] = zero
    divisor = 6 if zero is None else 4
    scales = floats((rng.random(zeros.shape, np.float32) + 0.5) / divisor / columns**0.5, dtype).float().numpy()
    wide = (codes.astype(np.float32) - zeros.repeat(group, 1)) * scales.repeat(group, 1)
    return Drawn(codes, zeros, scales, wide)


def packed(rng: np.random.Generator, rows: int, columns: int, group: int, symmetric: bool) -> Layer:
    """compressed-tensors' `pack-quantized`."""
    made = draw(rng, rows, columns, group, 8 if symmetric else None, torch.bfloat16)
    tensors = {
        "weight_packed": words(made.codes, 1),
        "weight_scale": floats(made.scales, torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return tensors | ({} if symmetric else {"weight_zero_point": words(made.zeros, 0)}), made.values


def awq(rng: np.random.Generator, rows: int, columns: int, group: int) -> Layer:
    """AutoAWQ's `gemm`."""
    made = draw(rng, rows, columns, group)
    tensors = {
        "qweight": words(made.codes.T, 1, ORDER),
        "qzeros": words(made.zeros.T, 1, ORDER),
        "scales": floats(made.scales.T, torch.float16),
    }
    return tensors, made.values


def gptq(rng: np.random.Generator, rows: int, columns: int, group: int, less: int, zero: int | None = None) -> Layer:
    """GPTQ, zero points stored less a number: 1 in version 1, 0 in version 2."""
    made = draw(rng, rows, columns, group, zero)
    tensors = {
        "qweight": words(made.codes.T, 0),
        "qzeros": words((made.zeros.T - less) & 15, 1),
        "scales": floats(made.scales.T, torch.float16),
        "g_idx": torch.arange(columns, dtype=torch.int32) // group,
    }
    return tensors, made.values


def nvfp4(rng: np.random.Generator, rows: int, columns: int, names: tuple[str, str], divides: bool) -> Layer:
    """NVFP4 of compressed-tensors, whose number divides, or of ModelOpt, whose number multiplies."""
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.integers(0x38, 0x60, (rows, columns // 16), dtype=np.uint8)
    factor = np.float32(0.02 / columns**0.5)
    stored = np.float32(1) / factor if divides else factor
    used = np.float32(1) / stored if divides else stored
    values = E2M1[codes] * e4m3(scales).repeat(16, 1) * used
    tensors = {
        names[0]: torch.from_numpy(codes[:, 0::2] | (codes[:, 1::2] << 4)),
        "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        names[1]: torch.tensor([stored]) if divides else torch.tensor(stored),
    }
    return tensors, values


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors for all layers but the LM head."""
    asked = {"symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": asked, "input_activations": None}
    fields = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return {**fields, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}


FLOAT8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
Make = Callable[[np.random.Generator, int, int], Layer]
LAYOUTS: Mapping[str, tuple[dict[str, Any], Make]] = {
    "fp8-tensor": (compressed("float-quantized", **FLOAT8, strategy="tensor"), partial(fp8, per="tensor")),
    "fp8-channel": (compressed("float-quantized", **FLOAT8, strategy="channel"), partial(fp8, per="channel")),
    "fp8-block": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        partial(fp8, per="block", name="weight_scale_inv"),
    ),
    "fp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None},
        lambda rng, rows, columns: static(*fp8(rng, rows, columns, "tensor", "weight_scale_inv")),
    ),
    "w4a16-32": (compressed("pack-quantized", **INT4, group_size=32), partial(packed, group=32, symmetric=True)),
    "w4a16-zeros": (
        compressed("pack-quantized", **INT4, group_size=64) | {"version": "0.12"},
        partial(packed, group=64, symmetric=False),
    ),
    "awq": (AWQ, partial(awq, group=32)),
    "gptq-v1": (GPTQ | {"sym": False, "checkpoint_format": "gptq"}, partial(gptq, group=32, less=1)),
    "gptq-v2": (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, partial(gptq, group=32, less=0)),
    "gptq-symmetric": (GPTQ | {"checkpoint_format": "gptq"}, partial(gptq, group=32, less=1, zero=8)),
    "gptq-that-says-v1": (GPTQ | {"checkpoint_format": "gptq"}, partial(gptq, group=32, less=0, zero=8)),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        partial(nvfp4, names=("weight_packed", "weight_global_scale"), divides=True),
    ),
    "nvfp4-modelopt": (MODELOPT, partial(nvfp4, names=("weight", "weight_scale_2"), divides=False)),
}
ROUTERS = (".mlp.gate.", ".shared_expert_gate.")  # stay as they are
LAYOUTS["w4a16-zeros"][0]["config_groups"]["group_0"]["weights"]["symmetric"] = False


def random_parts(name: str, width: int, depth: int, *, wide: bool, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random parts of a matrix [N, K] in a format: codes without NaN, scales about 1 / sqrt(K), of 16 bits or of 32."""
    parts = {}
    for part, (shape, dtype) in MATRIX_FORMATS[name].specs(width, depth, torch.bfloat16).items():
        if dtype == torch.float32:
            scales = (torch.rand(shape, device=device) + 0.5) / depth**0.5
            parts[part] = scales if wide else scales.bfloat16().float()
        else:
            most = 16 if part.endswith("zeros") else 127 if part.endswith("scales") else 256
            parts[part] = torch.randint(most, shape, dtype=dtype, device=device)
            if part == "fp8":
                parts[part][(parts[part] & 127) == 127] = 0
    return parts


def quantise_target(directory: Path, layout: str, model: Any, *, seed: int = 0, plain: tuple[str, ...] = ()) -> None:
    """Rewrite a target of transformers', the linear layers of its decoder quantised; the model gets their numbers.

    plain  parts of the names of layers that stay as they are; the config must say so
    model  None: there is none to be given them
    """
    config, make = LAYOUTS[layout]
    rewrite(directory, {"": make}, model, seed=seed, plain=plain)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))


def store_kv_scales(directory: Path) -> None:
    """Add scales of a KV cache to a checkpoint: of the first layer by head, as ModelOpt names them, of others one."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((directory / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        owner = f"model.layers.{layer}.self_attn"
        if layer:
            tensors |= {f"{owner}.k_scale": torch.tensor([0.03]), f"{owner}.v_scale": torch.tensor(0.011)}
        else:
            by_head = torch.linspace(0.02, 0.3, config["num_key_value_heads"])
            tensors |= {f"{owner}.k_proj.k_scale": by_head, f"{owner}.v_proj.v_scale": by_head.flip(0).bfloat16()}
    save_file(tensors, file, metadata={"format": "pt"})


def rewrite(directory: Path, makers: Mapping[str, Make], model: Any, *, seed: int, plain: tuple[str, ...] = ()) -> None:
    """The tensors of a target, each linear layer by the first maker whose key is in its name."""
    rng, tensors, state = np.random.default_rng(seed), {}, {} if model is None else model.state_dict()
    for name, stored in load_file(directory / "model.safetensors").items():
        made = next((make for key, make in makers.items() if key in name), None)
        if (
            made is None
            or stored.dim() != 2
            or ".layers." not in name
            or any(part in name for part in (*plain, *ROUTERS))
        ):
            tensors[name] = stored
            continue
        parts, values = made(rng, *stored.shape)
        owner = name.removesuffix("weight")
        tensors |= {f"{owner}{part}": each for part, each in parts.items()}
        if model is not None:
            _place_of(state, name).copy_(torch.from_numpy(values))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _place_of(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A stored layer's place among transformers' tensors, where all experts' are stacked, gate over up."""
    outer, found, rest = name.partition(".experts.")
    if not found:
        return state[name]
    expert, part, _ = rest.split(".")
    if part == "down_proj":
        return state[f"{outer}.experts.{part}"][int(expert)]
    return state[f"{outer}.experts.gate_up_proj"][int(expert)].chunk(2)[part == "up_proj"]
