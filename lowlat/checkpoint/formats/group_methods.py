"""This module reads the keys of AutoAWQ, GPTQ and AutoRound in quantization_config.

AutoRound stores tensors like one of the other two, according to `packing_format`. It also exports files under their
names, with its own keys beside theirs.
"""

import re

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats.linear import AwqLinear, GptqLinear
from lowlat.checkpoint.formats.quantisation import Names, Quantisation, Rule
from lowlat.errors import ConfigError
from lowlat.kernels.formats.int4 import GROUPS

__all__ = ["parse_awq", "parse_gptq"]

MAX_MODULES = 1 << 16
# keys about AutoRound's search, and about activations, which stay bfloat16 here
ROUND_NO_EFFECT = tuple(
    """
    act_bits act_data_type act_dynamic act_group_size act_sym amp autoround_version batch_size block_name_to_quantize
    dataset disable_opt_rtn enable_adam enable_alg_ext enable_deterministic_algorithms enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input enable_torch_compile gradient_accumulate_steps iters low_cpu_mem_usage
    low_gpu_mem_usage lr minmax_lr model_free nblocks nsamples not_use_best_mse provider scale_dtype seed seqlen
    supported_types to_quant_block_names
    """.split()  # noqa: SIM905  a line a key would be a page
)
ROUND_PACKINGS = {
    "auto_gptq": "gptq",
    "gptq": "gptq",
    "auto_awq": "awq",
    "awq": "awq",
}
PLAIN_BITS = 16  # of a layer that is not quantised
AWQ_NO_EFFECT = (
    *(*ROUND_NO_EFFECT, "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
    *("desc_act", "meta", "pack_impl"),
)
# keys about how a file was made, by whom, and for which kernels of other engines
GPTQ_NO_EFFECT = ROUND_NO_EFFECT + tuple(
    """
    act_group_aware backend cache_block_outputs damp_auto_increment damp_percent disable_exllama exllama_config
    max_input_length meta model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block mse
    offload_to_disk offload_to_disk_path pack_impl pad_token_id quantizer static_groups tokenizer true_sequential
    use_cuda_fp16 use_exllama
    """.split()  # noqa: SIM905  a line a key would be a page
)


def parse_awq(fields: Fields) -> Quantisation:
    """Read the quantised layers of an AutoAWQ file. Raises ConfigError for other versions than `gemm`.

    Zero points are read even if the config says that there are none: `gemm` always stores them.
    """
    _check_bits(fields, ("bits", "w_bit"))
    group = _group(fields, ("group_size", "q_group_size"))
    _check_numbers(fields)
    for key in ("zero_point", "sym"):
        fields.optional_boolean(key)
    for key in ("format", "checkpoint_format"):  # as GPTQModel writes the version
        fields.refuse_unless(key, ("gemm",), "AutoAWQ's layout for matrix products")
    fields.refuse_unless("pack_dtype", ("int32",), "words of 32 bits")
    fields.refuse_unless("lm_head", (False,), "a plain LM head")
    version = (fields.optional_string("version") or "gemm").lower()
    if version != "gemm":
        raise fields.error("version", "'gemm'")
    names = fields.optional_strings("modules_to_not_convert", max_count=MAX_MODULES) or ()
    for key in AWQ_NO_EFFECT:
        fields.raw(key)
    fields.refuse_unknown(())
    rule = Rule(Names(whole=True), AwqLinear(group))
    return Quantisation(fields.label, (rule,), Names.parse(fields.label, ["lm_head", *names]))


def parse_auto_round(fields: Fields) -> Quantisation:
    """Read the quantised layers of an AutoRound file, which is packed like GPTQ's or AutoAWQ's.

    Raises ConfigError for other packings, and for quantised layers that differ from the rest.
    """
    packing = fields.optional_string("packing_format") or fields.optional_string("backend") or "auto_gptq"
    named = [ROUND_PACKINGS[part] for part in packing.split(":") if part in ROUND_PACKINGS]
    if not named:
        raise fields.error("packing_format", "'auto_round:auto_gptq' or 'auto_round:auto_awq'")
    _check_bits(fields, ("bits",))
    group, symmetric = _group(fields, ("group_size",)), fields.boolean("sym", True)
    _check_numbers(fields)
    names = fields.optional_strings("modules_to_not_convert", max_count=MAX_MODULES) or ()
    plain, head = _round_exceptions(fields, group, symmetric)
    head = fields.boolean("quant_lm_head", head)
    for key in (*ROUND_NO_EFFECT, "backend", "damp_percent", "desc_act", "static_groups", "true_sequential", "version"):
        fields.raw(key)
    fields.refuse_unknown(())
    stored = AwqLinear(group) if named[0] == "awq" else GptqLinear(group, has_offset=True, symmetric=symmetric)
    others = () if head else ("lm_head",)
    return Quantisation(
        fields.label, (Rule(Names(whole=True), stored),), Names.parse(fields.label, [*others, *names, *plain])
    )


def _round_exceptions(fields: Fields, group: int, symmetric: bool) -> tuple[list[str], bool]:
    """Return the layers that `extra_config` leaves plain, and whether the LM head is quantised like the others."""
    extra = fields.optional_object("extra_config")
    plain, head = [], False
    for name in () if extra is None else extra.values:
        layer = extra.optional_object(name) if extra is not None else None
        if layer is None:
            continue
        bits = layer.integer("bits", 1, 32, default=4)
        if bits >= PLAIN_BITS:
            # AutoRound searches for a regular expression anywhere in a module's name
            plain.append(f"re:.*{name.removeprefix('.*')}" if re.search(r"[*+?^$()\[\]{}|\\]", name) else name)
            continue
        _check_bits(layer, ("bits",))
        layer.refuse_unless("group_size", (group,), "layers in groups of one size")
        layer.refuse_unless("sym", (symmetric,), "layers with zero points of one kind")
        _check_numbers(layer)
        head = head or name == "lm_head"
        for key in ROUND_NO_EFFECT:
            layer.raw(key)
        layer.refuse_unknown(())
    return plain, head


def _check_numbers(fields: Fields) -> None:
    fields.refuse_unless("data_type", ("int",), "whole numbers")
    fields.refuse_unless("super_bits", (), "scales that are stored as they are")


def parse_gptq(fields: Fields) -> Quantisation:
    """Read the quantised layers of a GPTQ file, version 1 or 2. Raises ConfigError for activation order, other bits."""
    _check_bits(fields, ("bits",))
    group = _group(fields, ("group_size",))
    if fields.boolean("desc_act", False):
        raise ConfigError(f"{fields.label}: desc_act (columns in the order of activations) is not implemented")
    layout = _gptq_layout(fields)
    _check_numbers(fields)
    fields.refuse_unless("pack_dtype", ("int32",), "words of 32 bits")
    fields.refuse_unless("modules_in_block_to_quantize", ((), []), "every linear layer of a block")
    for key in GPTQ_NO_EFFECT:
        fields.raw(key)
    symmetric, head = fields.boolean("sym", True), fields.boolean("lm_head", False)
    plain = [] if head else ["lm_head"]
    dynamic = fields.optional_object("dynamic")
    for name in () if dynamic is None else dynamic.values:
        if not name.startswith("-:"):  # GPTQModel's mark of modules that stay plain
            raise ConfigError(f"{fields.label}: dynamic {name!r} is not implemented: layers are quantised alike")
        plain.append(f"re:{name.removeprefix('-:')}")
    fields.refuse_unknown(())
    rule = Rule(Names(whole=True), GptqLinear(group, layout == "gptq", symmetric))
    return Quantisation(fields.label, (rule,), Names.parse(fields.label, plain))


def _gptq_layout(fields: Fields) -> str:
    """Return the version of the layout: in `checkpoint_format`, in GPTQModel's `format`, or in both."""
    found = {key: fields.optional_string(key) for key in ("checkpoint_format", "format")}
    for key, layout in found.items():
        if layout not in (None, "gptq", "gptq_v2"):
            raise fields.error(key, "'gptq' or 'gptq_v2'")
    older, newer = found.values()
    if older is not None and newer is not None and older != newer:
        raise ConfigError(f"{fields.label}: checkpoint_format {older!r} and format {newer!r} differ")
    return older or newer or "gptq"


def _check_bits(fields: Fields, keys: tuple[str, ...]) -> None:
    for key in keys:
        fields.refuse_unless(key, (4,), "numbers of four bits")


def _group(fields: Fields, keys: tuple[str, ...]) -> int:
    found = [size for key in keys if (size := fields.optional_integer(key, -1, 1 << 20)) is not None]
    if not found or found[0] not in GROUPS:
        raise fields.error(keys[0], f"one of {', '.join(map(str, GROUPS))}")
    return found[0]
