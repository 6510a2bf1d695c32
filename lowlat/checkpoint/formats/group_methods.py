"""AutoAWQ's and GPTQ's keys in quantization_config: four bits in groups of inputs, the LM head plain unless told."""

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats.linear import AwqLinear, GptqLinear
from lowlat.checkpoint.formats.quantisation import Names, Quantisation, Rule
from lowlat.errors import ConfigError
from lowlat.kernels.formats.int4 import GROUPS

__all__ = ["parse_awq", "parse_gptq"]

MAX_MODULES = 1 << 16
AWQ_NO_EFFECT = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
# how a file was made, who made it, and which kernels others would run
GPTQ_NO_EFFECT = tuple(
    """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
    dataset disable_exllama exllama_config max_input_length meta model_file_base_name model_name_or_path
    model_seqlen module_name_preceding_first_block mse pad_token_id quantizer static_groups tokenizer true_sequential
    use_cuda_fp16 use_exllama
    """.split()  # noqa: SIM905  a line a key would be a page
)


def parse_awq(fields: Fields) -> Quantisation:
    """The layers of a file of AutoAWQ's. Raises ConfigError for other versions than `gemm`."""
    _check_bits(fields, ("bits", "w_bit"))
    group = _group(fields, ("group_size", "q_group_size"))
    if not fields.boolean("zero_point", True):
        raise fields.error("zero_point", "true")
    version = (fields.optional_string("version") or "gemm").lower()
    if version != "gemm":
        raise fields.error("version", "'gemm'")
    names = fields.optional_strings("modules_to_not_convert", max_count=MAX_MODULES) or ()
    for key in AWQ_NO_EFFECT:
        fields.raw(key)
    fields.refuse_unknown(())
    rule = Rule(Names(whole=True), AwqLinear(group))
    return Quantisation(fields.label, (rule,), Names.parse(fields.label, ["lm_head", *names]))


def parse_gptq(fields: Fields) -> Quantisation:
    """The layers of a GPTQ file, version 1 or 2. Raises ConfigError for activation order, and for other bits."""
    _check_bits(fields, ("bits",))
    group = _group(fields, ("group_size",))
    if fields.boolean("desc_act", False):
        raise ConfigError(f"{fields.label}: desc_act (columns in the order of activations) is not implemented")
    layout = fields.optional_string("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise fields.error("checkpoint_format", "'gptq' or 'gptq_v2'")
    fields.refuse_unless("pack_dtype", ("int32",), "words of 32 bits")
    fields.refuse_unless("modules_in_block_to_quantize", ((), []), "every linear layer of a block")
    for key in GPTQ_NO_EFFECT:
        fields.raw(key)
    symmetric, head = fields.boolean("sym", True), fields.boolean("lm_head", False)
    fields.refuse_unknown(())
    rule = Rule(Names(whole=True), GptqLinear(group, layout == "gptq", symmetric))
    return Quantisation(fields.label, (rule,), Names(() if head else ("lm_head",)))


def _check_bits(fields: Fields, keys: tuple[str, ...]) -> None:
    for key in keys:
        fields.refuse_unless(key, (4,), "numbers of four bits")


def _group(fields: Fields, keys: tuple[str, ...]) -> int:
    found = [size for key in keys if (size := fields.optional_integer(key, -1, 1 << 20)) is not None]
    if not found or found[0] not in GROUPS:
        raise fields.error(keys[0], f"one of {', '.join(map(str, GROUPS))}")
    return found[0]
