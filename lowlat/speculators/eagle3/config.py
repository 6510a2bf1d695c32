"""This module reads the geometry and flags of EAGLE3 draft models from config.json and tensor headers.

The tensors decide sizes and the presence of parts; a config that contradicts them is refused.
Source: SafeAILab/EAGLE, SpecForge, TensorRT Model Optimizer, speculators and DeepSpec.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowlat.checkpoint.formats import read_quantisation
from lowlat.errors import ConfigError
from lowlat.models.families.dense import Sizes, parse_sizes
from lowlat.models.families.known_keys import HARMLESS_KEYS
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import check_architecture, read_config
from lowlat.speculators.draft_files.sizes import GATES, check_target, size_fields, vocabulary_fields
from lowlat.speculators.draft_files.tensors import DraftTensors
from lowlat.speculators.draft_files.windows import draft_windows
from lowlat.speculators.draft_layers import layer_style, with_layer_defaults
from lowlat.speculators.eagle3.capture import IDS_KEY, MAX_FEATURES, OUTPUTS_KEY, capture_boundaries
from lowlat.speculators.eagle3.draft_file import DEEPSPEC, DraftFile
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.tensors import MASK_HIDDEN, open_draft_model

__all__ = ["EAGLE3", "DraftKind", "parse_draft", "read_draft_config"]

ARCHITECTURES = (
    *("LlamaForCausalLM", "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3Deep", "Eagle3LlamaForCausalLM"),
    *("Eagle3DraftModel", "Eagle3Speculator", "PEagleDraftModel", "PEagleSpeculator", "LlamaEagle3DraftModel"),
    *DEEPSPEC,
)
MAX_DRAFT_LAYERS = 16
LAYER_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt_oss")
# Keys that speculators and other trainers write besides the geometry.
HARMLESS_HEAD_KEYS = HARMLESS_KEYS | {
    *("auto_map", "down_sample_ratio", "down_sample_ratio_min", "dtype", "embed_requires_grad", "enable_sp_ulysses"),
    *("experts_per_token", "has_no_defaults_at_init", "max_seq_len", "num_experts_per_tok", "num_local_experts"),
    *("para_depths", "prediction_loss_weight", "speculators_config", "speculators_version", "step_loss_decay"),
    *("target_model_name_or_path", "target_model_type", "target_text_model_type", "torch_dtype"),
    *("truncated_vocab_size", "ttt_length", "ttt_steps"),
}


def _refuse_unimplemented(file: DraftFile) -> None:
    check_architecture(file.top, ARCHITECTURES)
    layer, why = file.layer, "Llama-style layers over captured features"
    if layer_style(layer) is None:
        layer.refuse_unless("model_type", LAYER_TYPES, why)
        layer.refuse_unless("hidden_act", GATES, "SiLU and GELU gates")
    if file.layout == "deepspec":  # each of its layers would read the embedding, and its own evaluator takes one
        for key in ("num_hidden_layers", "draft_num_hidden_layers"):
            layer.refuse_unless(key, (1,), "DeepSpec's draft models of one layer")
    for place in file.places():
        place.refuse_unless("parallel_draft_step", (0, 1), "one token a draft step")
    if file.eagle is not None:
        file.eagle.refuse_unless("use_input_layernorm_in_first_layer", (True,), "the embedding is normed")
        file.eagle.refuse_unless("use_last_layernorm", (True,), "the state is normed before the LM head")
        file.eagle.refuse_unless("use_mtp_layernorm", (False,), why)
        file.eagle.refuse_unless("next_layer_regular", (True,), why)
        file.eagle.raw("parallel_draft_heads_num_layers")  # of no effect with one draft step


def _biases(file: DraftFile, tensors: DraftTensors) -> tuple[bool, bool, bool]:
    """Whether the QKV projections, the output projections, and the FFN have biases; the tensors decide.

    In layouts whose exporters write the config from the model, a bias that the config states must be present.
    """
    found = {
        "qkv_bias": any(tensors.in_any_layer(f"self_attn.{part}_proj.bias") for part in "qkv"),
        "output_bias": tensors.in_any_layer("self_attn.o_proj.bias"),
        "mlp_bias": any(tensors.in_any_layer(f"mlp.{part}_proj.bias") for part in ("gate", "up", "down")),
    }
    promised = {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias", "qkv_bias": "qkv_bias"}
    for key, name in promised.items():
        if not file.layer.boolean(key, False) or found[name]:
            continue
        if file.layout in ("modelopt", "speculators"):
            raise ConfigError(f"{file.layer.label}: {key} is true, but {tensors.checkpoint.directory} has no such bias")
        # SpecForge and SafeAILab copy the key from the target's config and never read it
        file.notes.append(f"{key} is true in the config, but there are no such tensors: ignored")
    return found["qkv_bias"], found["output_bias"], found["mlp_bias"]


def _norm_flag(file: DraftFile, key: str, present: bool) -> bool:
    """Whether there is a norm before fc: flag and tensors must agree; without a flag the tensors decide."""
    flag = file.flag(key)
    if flag is None:
        if present:
            file.notes.append(f"{key} is not in the config, but its tensors are there: applied")
        return present
    if flag != present:
        raise ConfigError(f"{file.top.label}: {key} is {flag}, but its tensors are {'there' if present else 'missing'}")
    return flag


def _feedback(file: DraftFile, fc_norm: bool) -> bool:
    """Whether the next draft step reads the state after the final norm.

    In speculators, ModelOpt and the engines norm_output means that. SpecForge's own trainer once wrote it as true by
    default, and meant only that the LM head reads the normed state. So in its layout, and SafeAILab's, it counts only
    together with fc_norm, the other half of EAGLE 3.1.
    """
    explicit = file.flag("return_hidden_post_norm")
    flag = file.flag("norm_output")
    if explicit is not None:
        return explicit
    if flag and file.layout in ("specforge", "safeai") and not fc_norm:
        file.notes.append("norm_output without fc_norm says nothing about feedback in this layout: pre-norm feedback")
        return False
    return bool(flag)


def _residual(file: DraftFile) -> bool:
    """Whether the layer's residual is the normed state; in speculators, unlike vLLM, the default is false."""
    flag = file.flag("norm_before_residual")
    if flag is None and file.layout == "speculators":
        file.notes.append("norm_before_residual is not in the config: taken as false, as speculators does")
    return bool(flag)


def _vocabulary(file: DraftFile, tensors: DraftTensors, sizes: Sizes, target: ModelConfig) -> dict[str, Any]:
    """Do as `vocabulary_fields`, and raise ConfigError if the target's tensor cannot replace a missing one."""
    found, label = vocabulary_fields(file.top, tensors, sizes, target), file.top.label
    rows = found["draft_vocab_size"]
    if rows < target.vocab_size and not found["own_draft_map"]:
        raise ConfigError(f"{label}: tensor 'd2t' is missing; {rows} draft ids cannot be mapped to the target's")
    own_lm_head, own_embedding = found["own_lm_head"], found["own_embedding"]
    shared = [name for name, own in (("lm_head", own_lm_head), ("embed_tokens", own_embedding)) if not own]
    if shared and sizes.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{label}: {shared[0]}.weight is missing and the target's cannot be used: hidden_size "
            f"{sizes.hidden_size} is not the target's {target.hidden_size}"
        )
    tied = [place.boolean("tie_word_embeddings", False) for place in file.places()]
    if any(tied) and not own_lm_head and (own_embedding or not target.tie_embeddings):
        raise ConfigError(f"{label}: tie_word_embeddings without lm_head.weight is not implemented for heads")
    return found


def _windows(file: DraftFile, tensors: DraftTensors, sizes: Sizes) -> tuple[int | None, ...]:
    """Read the window of each layer."""
    count = file.layer.integer("num_hidden_layers", 1, MAX_DRAFT_LAYERS)
    tensors.check_layers(count, sizes.hidden_size, file.layer.label)
    return draft_windows(file.layer, count, file.notes)


def _layer_fields(file: DraftFile, tensors: DraftTensors, sizes: Sizes, target: ModelConfig) -> dict[str, Any]:
    """Read the geometry's fields about layers, of plain layers or of a family's. Raises ConfigError."""
    style = layer_style(file.layer)
    if style is not None:
        tensors.check_layers(sizes.num_layers, sizes.hidden_size, file.layer.label)
        return style.read(file.layer, sizes, target)
    windows, biases = _windows(file, tensors, sizes), _biases(file, tensors)
    return size_fields(file.layer, tensors, sizes, target, windows=windows, biases=biases)


def _has_no_features(file: DraftFile, tensors: DraftTensors, sizes: Sizes, target: ModelConfig) -> bool:
    """Whether the draft model reads the target's final hidden state instead of captured features."""
    directory = tensors.checkpoint.directory
    if file.flag("use_aux_hidden_state") is not False:
        if "fc.weight" not in tensors:
            raise ConfigError(
                f"{directory}: tensor 'fc.weight' is missing: not an EAGLE3 draft model, or one without auxiliary "
                f"features, whose config says use_aux_hidden_state false"
            )
        return False
    if sizes.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{file.layer.label}: hidden_size {sizes.hidden_size} is not the target's {target.hidden_size}, whose "
            f"final hidden state it reads (use_aux_hidden_state is false)"
        )
    if "fc.weight" in tensors:
        file.notes.append("use_aux_hidden_state is false: fc.weight is not used")
    return True


def _num_features(file: DraftFile, tensors: DraftTensors, target: ModelConfig) -> int:
    entry = tensors.entry("fc.weight", 2)
    count, rest = divmod(entry.shape[1], target.hidden_size)
    if rest or not 1 <= count <= MAX_FEATURES:
        raise ConfigError(
            f"{entry.file}: tensor {entry.name!r}: expected columns a multiple of the target's hidden_size "
            f"{target.hidden_size}, found {list(entry.shape)}: a draft model for another target"
        )
    named = file.top.optional_integer("num_aux_hidden_states", 1, MAX_FEATURES)
    if named is not None and named != count:
        raise ConfigError(f"{file.top.label}: num_aux_hidden_states {named}, but fc.weight has columns for {count}")
    return count


def _refuse_unknown(file: DraftFile) -> None:
    for key in (IDS_KEY, OUTPUTS_KEY):
        file.top.raw(key)  # not read when the caller overrides them
    if file.eagle is not None:
        file.eagle.raw(IDS_KEY)
        file.eagle.raw("layer_ids")
    style = layer_style(file.layer)
    harmless = HARMLESS_HEAD_KEYS if style is None else HARMLESS_HEAD_KEYS | style.harmless
    for place in file.places():
        place.refuse_unknown(() if place is file.eagle else harmless)


@dataclass(frozen=True)
class DraftKind:
    """A method whose draft models have the file format of EAGLE3's.

    record  the class of its geometry
    check   raises ConfigError for tensors of another method's draft model
    own     reads the record's fields that EAGLE3's lacks, from a file, its tensors, the target and the number of
            features. Raises ConfigError
    """

    record: type[Eagle3Config]
    check: Callable[[DraftTensors], None]
    own: Callable[[DraftFile, DraftTensors, ModelConfig, int], dict[str, Any]]


def _refuse_mask(tensors: DraftTensors) -> None:
    if MASK_HIDDEN in tensors:
        raise ConfigError(
            f"{tensors.checkpoint.directory}: tensor {tensors.stored[MASK_HIDDEN]!r}: this is a P-EAGLE draft model; "
            "method must be 'peagle'"
        )


EAGLE3 = DraftKind(Eagle3Config, _refuse_mask, lambda *file: {})


def parse_draft(
    directory: Path, target: ModelConfig, capture_layers: tuple[int, ...] | None, kind: DraftKind = EAGLE3
) -> tuple[Eagle3Config, DraftTensors, tuple[str, ...]]:
    """Read a draft model's geometry, its tensors by normalised name, and notes for its user. Raises ConfigError.

    kind  the method that it must belong to
    """
    fields = with_layer_defaults(read_config(directory))
    tensors = open_draft_model(directory)
    file = DraftFile(fields, tensors)
    kind.check(tensors)
    _refuse_unimplemented(file)
    sizes = parse_sizes(file.layer, default_vocab_size=target.vocab_size, default_max_position=target.max_position)
    check_target(file.top, target)
    final_hidden = _has_no_features(file, tensors, sizes, target)
    fc_norm = _norm_flag(file, "fc_norm", any(name.startswith("fc_norm.") for name in tensors.stored))
    norm_before_fc = _norm_flag(file, "norm_before_fc", "input_norm.weight" in tensors)
    if final_hidden and (fc_norm or norm_before_fc):
        raise ConfigError(f"{fields.label}: use_aux_hidden_state is false, but there are norms before fc")
    boundaries = capture_boundaries(
        file.top,
        file.eagle,
        file.layout,
        num_layers=target.num_layers,
        num_features=1 if final_hidden else _num_features(file, tensors, target),
        override=capture_layers,
        final_hidden=final_hidden,
    )
    found = (read_quantisation(place, directory) for place in file.places())
    config = kind.record(
        layout=file.layout,
        quantisation=next((each for each in found if each is not None), None),
        capture_boundaries=boundaries,
        final_hidden=final_hidden,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=_feedback(file, fc_norm),
        norm_before_residual=_residual(file),
        **kind.own(file, tensors, target, len(boundaries)),
        **_layer_fields(file, tensors, sizes, target),
        **_vocabulary(file, tensors, sizes, target),
    )
    _refuse_unknown(file)
    return config, tensors, tuple(file.notes)


def read_draft_config(
    directory: str | Path,
    target: ModelConfig,
    *,
    capture_layers: tuple[int, ...] | None = None,
    kind: DraftKind = EAGLE3,
) -> Eagle3Config:
    """Read and check a draft model's geometry for a target; of the weights only headers are read.

    capture_layers  boundaries that override the config's; None: the config's
    Raises ConfigError for a draft model of another kind or for another target, and for features that are not
    implemented.
    """
    return parse_draft(Path(directory), target, capture_layers, kind)[0]
