"""This module reads the quantisation in configs, by quant_method, and refuses unknown methods and values by name.

Only weights are quantised. Keys for activations, which stay bfloat16, have no effect, nor have keys for the KV cache,
which the option kv_cache_dtype decides. `group_methods` has the keys of GPTQ, AutoAWQ and AutoRound.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats.group_methods import parse_auto_round, parse_awq, parse_gptq
from lowlat.checkpoint.formats.linear import Fp8Linear, Nvfp4Linear, PackedLinear, StoredLinear
from lowlat.checkpoint.formats.quantisation import Names, Quantisation, Rule
from lowlat.checkpoint.json_file import read_object, shown
from lowlat.checkpoint.tensors import QUANTISATION_FILE
from lowlat.errors import ConfigError
from lowlat.kernels.formats.int4 import GROUPS

__all__ = ["METHODS", "read_quantisation"]

MAX_MODULES = 1 << 16
FORMATS_OF = {  # compressed-tensors' layouts -> type, bits, strategies
    "float-quantized": ("float", 8, ("tensor", "channel", "block")),
    "naive-quantized": ("float", 8, ("tensor", "channel", "block")),
    "pack-quantized": ("int", 4, ("group",)),
    "nvfp4-pack-quantized": ("float", 4, ("tensor_group",)),
}
MIXED = "mixed-precision"
NO_EFFECT = ("observer", "observer_kwargs", "zp_dtype", "scale_dtype", "version")
MODELOPT_LAYERS = {"FP8": Fp8Linear("tensor")} | dict.fromkeys(
    ("NVFP4", "W4A16_NVFP4"), Nvfp4Linear("weight", "weight_scale_2", divides=False)
)


def quantisation_config(fields: Fields) -> Fields | None:
    """Return a config's quantisation, also under the key's older name. Raises ConfigError."""
    older, own = (fields.optional_object(key) for key in ("compression_config", "quantization_config"))
    return own if own is not None and own.values else older


def read_quantisation(fields: Fields, directory: Path) -> Quantisation | None:
    """Read the quantised layers from a model's config, or from ModelOpt's file beside it; None for plain weights.

    Raises ConfigError for a quant_method that is not implemented, and for such keys and values.
    """
    own = quantisation_config(fields)
    beside = directory / QUANTISATION_FILE
    if own is None and beside.exists():
        file = Fields(read_object(beside), str(beside))
        own = file.optional_object("quantization")
        if own is not None and own.values:
            return _parse_modelopt(own)
    if own is None or not own.values:
        return None
    method = own.optional_string("quant_method")
    if method is None or method not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise ConfigError(
            f"{own.label}: quant_method {method!r} is not implemented for this family; implemented: {known}; or take "
            'the plain model, and round it at load (--quantize fp8 or int4, quantize="int4")'
        )
    return METHODS[method](own)


def _parse_compressed(fields: Fields) -> Quantisation | None:
    groups = fields.optional_object("config_groups")
    if fields.raw("kv_cache_scheme") and (groups is None or not groups.values):
        return None  # the cache alone is quantised
    layout = fields.optional_string("format")
    if layout not in (*FORMATS_OF, MIXED):
        raise ConfigError(f"{fields.label}: format {layout!r} is not implemented; implemented: {', '.join(FORMATS_OF)}")
    fields.refuse_unless("quantization_status", ("compressed", "frozen"), "weights that are stored quantised")
    for key in ("version", "global_compression_ratio"):
        fields.raw(key)
    for key in ("sparsity_config", "transform_config"):
        inner = fields.optional_object(key)
        if inner is not None and inner.values and inner.values.get("format") != "dense":
            raise ConfigError(f"{fields.label}: {key} {shown(inner.values)} is not implemented")
    if groups is None or not groups.values:
        raise ConfigError(f"{fields.label}: config_groups is missing; it says how weights are stored")
    plain = Names.parse(f"{fields.label}: ignore", fields.optional_strings("ignore", max_count=MAX_MODULES) or ())
    fields.refuse_unknown(())
    return Quantisation(fields.label, tuple(_compressed_group(groups, name, layout) for name in groups.values), plain)


def _compressed_group(groups: Fields, name: str, layout: str) -> Rule:
    group = groups.optional_object(name)
    weights = None if group is None else group.optional_object("weights")
    if group is None or weights is None:
        raise ConfigError(f"{groups.label}: {name} has no weights; it says how weights are stored")
    own = group.optional_string("format") or layout
    if own not in FORMATS_OF:
        raise ConfigError(f"{group.label}: format {own!r} is not implemented; implemented: {', '.join(FORMATS_OF)}")
    targets = group.optional_strings("targets", max_count=MAX_MODULES) or ("Linear",)
    for key in ("input_activations", "output_activations"):
        group.raw(key)
    group.refuse_unknown(())
    return Rule(Names.parse(f"{group.label}: targets", targets), _compressed_layout(weights, own))


def _compressed_layout(weights: Fields, layout: str) -> StoredLinear:
    kind, bits, strategies = FORMATS_OF[layout]
    weights.refuse_unless("type", (kind,), f"what {layout} holds")
    weights.refuse_unless("num_bits", (bits,), f"what {layout} holds")
    weights.refuse_unless("dynamic", (False,), "weights with scales that are stored")
    weights.refuse_unless("actorder", ("static", "weight"), "columns in the order of their inputs")
    strategy = weights.optional_string("strategy") or "tensor"
    if strategy not in strategies:
        raise weights.error("strategy", f"{' or '.join(map(repr, strategies))}, which {layout} has here,")
    for key in NO_EFFECT:
        weights.raw(key)
    size = weights.optional_integer("group_size", -1, 1 << 20)
    shape = weights.optional_integers("block_structure", 1, 1 << 20, max_count=2)
    symmetric = weights.boolean("symmetric", True)
    weights.refuse_unknown(())
    if layout == "pack-quantized":
        if size not in GROUPS:
            raise weights.error("group_size", f"one of {', '.join(map(str, GROUPS))}")
        return PackedLinear(size, symmetric)
    if not symmetric:
        raise weights.error("symmetric", f"true, as {layout} has it here,")
    if layout == "nvfp4-pack-quantized":
        if size != 16:
            raise weights.error("group_size", "16")
        return Nvfp4Linear("weight_packed", "weight_global_scale", divides=True)
    if strategy == "block" and shape != (128, 128):
        raise weights.error("block_structure", "[128, 128]")
    return Fp8Linear("tensor" if strategy == "tensor" else "channel" if strategy == "channel" else "block")


def _parse_fp8(fields: Fields) -> Quantisation:
    fields.refuse_unless("fmt", ("e4m3", "float8_e4m3fn"), "FP8 of four bits of exponent")
    fields.refuse_unless("activation_scheme", ("dynamic", "static"), "FP8 as transformers has it")
    fields.refuse_unless("scale_fmt", ("ue8m0", "float"), "scales that are stored as numbers")
    shape = fields.optional_integers("weight_block_size", 1, 1 << 20, max_count=2)
    if shape not in (None, (128, 128)):
        raise fields.error("weight_block_size", "[128, 128], or absent where a tensor has one scale")
    fields.raw("kv_cache_scheme")
    names = [
        name
        for key in ("modules_to_not_convert", "ignored_layers")
        for name in fields.optional_strings(key, max_count=MAX_MODULES) or ()
    ]
    fields.refuse_unknown(("dequantize",))
    # AutoFP8's files of 2024 have no blocks, and a scale for each tensor under another name
    stored = Fp8Linear("tensor") if shape is None else Fp8Linear("block", "weight_scale_inv")
    return Quantisation(
        fields.label, (Rule(Names(whole=True), stored),), Names.parse(fields.label, ["lm_head", *names])
    )


def _parse_modelopt(fields: Fields) -> Quantisation | None:
    fields.refuse_unless("quant_method", ("modelopt", "modelopt_fp4"), "ModelOpt's exports")
    algorithm = fields.optional_string("quant_algo")
    if algorithm is None and fields.raw("kv_cache_quant_algo"):
        return None  # the cache alone is quantised
    for key in ("producer", "kv_cache_quant_algo", "kv_cache_scheme", "config_groups", "has_zero_point"):
        fields.raw(key)
    fields.refuse_unless("pre_quant_scale", (False,), "inputs that are not scaled")
    names = [
        name
        for key in ("ignore", "exclude_modules")
        for name in fields.optional_strings(key, max_count=MAX_MODULES) or ()
    ]
    _check_group(fields)
    layers = fields.optional_object("quantized_layers")
    if algorithm == "MIXED_PRECISION":
        if layers is None or not layers.values:
            raise ConfigError(f"{fields.label}: quantized_layers is missing; MIXED_PRECISION needs it")
        rules = tuple(_modelopt_layer(layers, name) for name in layers.values)
    else:
        rules = (Rule(Names(whole=True), _modelopt_layout(fields, algorithm)),)
    fields.refuse_unknown(())
    return Quantisation(fields.label, rules, Names.parse(fields.label, names))


def _modelopt_layer(layers: Fields, name: str) -> Rule:
    layer = layers.optional_object(name)
    if layer is None:
        raise layers.error(name, "an object")
    algorithm = layer.optional_string("quant_algo")
    _check_group(layer)
    layer.refuse_unless("has_zero_point", (False,), "numbers without zero points")
    layer.refuse_unknown(())
    return Rule(Names.parse(layer.label, [name]), _modelopt_layout(layer, algorithm))


def _modelopt_layout(fields: Fields, algorithm: str | None) -> StoredLinear:
    if algorithm not in MODELOPT_LAYERS:
        known = ", ".join((*MODELOPT_LAYERS, "MIXED_PRECISION"))
        raise ConfigError(f"{fields.label}: quant_algo {algorithm!r} is not implemented; implemented: {known}")
    return MODELOPT_LAYERS[algorithm]


def _check_group(fields: Fields) -> None:
    fields.refuse_unless("group_size", (16,), "NVFP4's blocks of 16")


METHODS: Mapping[str, Callable[[Fields], Quantisation | None]] = {
    "compressed-tensors": _parse_compressed,
    "fp8": _parse_fp8,
    "awq": parse_awq,
    "gptq": parse_gptq,
    "auto-round": parse_auto_round,
    "intel/auto-round": parse_auto_round,
    "modelopt": _parse_modelopt,
    "modelopt_fp4": _parse_modelopt,
}
