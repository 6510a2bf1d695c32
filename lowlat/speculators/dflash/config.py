"""This module reads draft models that fill a block: DFlash's two layouts, and the parts that other methods share.

    layout       recognised by                    ids of layers                            sizes in
    z-lab        DFlashDraftModel, dflash_config  dflash_config.target_layer_ids: id k is  the top level
                                                  layer k's output, boundary k + 1
    speculators  speculators_model_type           aux_hidden_state_layer_ids: boundaries   transformer_layer_config
    deepspec     see `lowlat.speculators.dspark`  target_layer_ids, as z-lab's; -1 is      the top level
                                                  boundary 0

DFlash2's draft models have these layouts, too, with four more sizes: `conv_kernel_size`, `conv_group_size`,
`selector_rank` and `selector_top_k`.
Source: z-lab/dflash, and vllm-project/speculators' `models/dflash` and `models/dflash2`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats import read_quantisation
from lowlat.checkpoint.tensors import Checkpoint
from lowlat.errors import ConfigError
from lowlat.models.families.dense import Sizes, parse_sizes
from lowlat.models.families.known_keys import HARMLESS_KEYS
from lowlat.models.geometry import DraftLayout, ModelConfig
from lowlat.models.hf_config import check_architecture, read_config
from lowlat.speculators.dflash.geometry import DflashConfig, LocalConv, Selector
from lowlat.speculators.draft_files.sizes import GATES, check_target, size_fields, vocabulary_fields
from lowlat.speculators.draft_files.tensors import DraftTensors
from lowlat.speculators.draft_files.windows import draft_windows
from lowlat.speculators.draft_layers import layer_style, with_layer_defaults

__all__ = ["TYPES", "BlockFile", "BlockKind", "parse_block_model", "parse_dflash"]

SECOND = "DFlash2DraftModel"
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator", SECOND)
TYPES = {"dflash2": "dflash"}  # speculators_model_type -> method, for variants of a method
MAX_LAYERS, MAX_FEATURES, MAX_BLOCK, MAX_RANKS = 16, 8, 64, 32
OVERRIDE = "give capture_layers, the boundaries themselves"
HARMLESS_DRAFT_KEYS = HARMLESS_KEYS | {
    *("auto_map", "dtype", "torch_dtype", "speculators_config", "speculators_version", "num_anchors", "max_anchors"),
    *("loss_decay_gamma", "target_model_type", "target_text_model_type"),
}


@dataclass(frozen=True)
class BlockFile:
    """The objects of a config: the top level, the layers' sizes, the method's own keys; and the config's layout."""

    top: Fields
    layer: Fields
    own: Fields
    layout: DraftLayout


@dataclass(frozen=True)
class BlockKind:
    """How the config of one method is recognised and read.

    name           as users know it
    plain          finds the objects of a config that is not speculators'. Raises ConfigError for another method's
    record         the class of its geometry
    own            reads the record's fields that DFlash's lacks. Raises ConfigError
    anchor_drafts  whether the last known token's row drafts by default
    """

    method: str
    name: str
    architectures: tuple[str, ...]
    plain: Callable[[Fields], BlockFile]
    record: type[DflashConfig]
    own: Callable[[BlockFile], dict[str, Any]]
    anchor_drafts: bool


def _zlab_file(fields: Fields) -> BlockFile:
    own = fields.optional_object("dflash_config")
    if own is None:
        raise ConfigError(f"{fields.label}: dflash_config is missing: this is no DFlash draft model")
    return BlockFile(fields, fields, own, "z-lab")


DFLASH = BlockKind("dflash", "DFlash", ARCHITECTURES, _zlab_file, DflashConfig, lambda file: {}, False)


def _places(fields: Fields, kind: BlockKind) -> BlockFile:
    found = fields.optional_string("speculators_model_type")
    nested = fields.optional_object("transformer_layer_config")
    if found is None:
        return kind.plain(fields)
    if TYPES.get(found, found) != kind.method:
        raise ConfigError(f"{fields.label}: speculators_model_type must be {kind.method!r}, found {found!r}")
    if nested is None:
        raise ConfigError(f"{fields.label}: transformer_layer_config is missing; speculators' draft models have it")
    return BlockFile(fields, with_layer_defaults(nested), fields, "speculators")


def _refuse_unimplemented(file: BlockFile, kind: BlockKind) -> None:
    check_architecture(file.top, kind.architectures)
    for place in (file.own, file.top):
        place.refuse_unless("output_multiplier", (1, 1.0), "logits as the LM head makes them")
    file.own.refuse_unless("projector_type", (), "DFlash without a projector (Domino, DSpark)")
    file.own.refuse_unless("attention_mode", ("gqa", "mha"), "grouped-query attention")


def _layer_fields(file: BlockFile, tensors: DraftTensors, sizes: Sizes, target: ModelConfig) -> dict[str, Any]:
    """Read the geometry's fields about layers, of plain layers or of a family's. Raises ConfigError."""
    style = layer_style(file.layer)
    if style is not None:
        return {**style.read(file.layer, sizes, target), "causal": _causal(file, (None,) * sizes.num_layers)}
    file.layer.refuse_unless("model_type", ("qwen3", "llama"), "Qwen3- and Llama-style layers, and Gemma 4's")
    file.layer.refuse_unless("hidden_act", GATES, "SiLU and GELU gates")
    windows = draft_windows(file.layer, sizes.num_layers, [])
    biased = {part: tensors.in_any_layer(f"self_attn.{part}_proj.bias") for part in "qkvo"}
    biases = (biased["q"] or biased["k"] or biased["v"], biased["o"], False)
    return {
        **size_fields(file.layer, tensors, sizes, target, windows=windows, biases=biases),
        "causal": _causal(file, windows),
        "embedding_scale": file.own.optional_number("input_embedding_scale", 1e-6, 1e6),
        "logit_softcap": _softcap(file),
    }


def _causal(file: BlockFile, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Whether each layer is causal: a row of the block attends to no later one. Raises ConfigError for a contradiction.

    z-lab's configs state it for all layers, `is_causal`; by default the layers with a window are causal. Speculators'
    configs state it for the layers with a window, `sliding_window_non_causal`; by default no layer is causal.
    """
    if file.layout == "speculators":
        slides = file.top.optional_boolean("sliding_window_non_causal") is False
        return tuple(slides and window is not None for window in windows)
    stated = {place.optional_boolean(key) for place, key in ((file.top, "is_causal"), (file.own, "causal"))} - {None}
    if len(stated) > 1:
        raise ConfigError(f"{file.top.label}: is_causal and dflash_config's causal are contradictory")
    always = next(iter(stated), None)
    return tuple(window is not None if always is None else always for window in windows)


def _dflash2(file: BlockFile, hidden_size: int) -> dict[str, Any]:
    """Read the convolution and the selector of DFlash2; {} for the first DFlash. Raises ConfigError."""
    most = {"conv_kernel_size": 8, "conv_group_size": 1 << 12, "selector_rank": 1 << 12, "selector_top_k": MAX_RANKS}
    sizes = {key: file.own.optional_integer(key, 1, limit) for key, limit in most.items()}
    named = SECOND in (file.top.optional_strings("architectures", max_count=16) or ())
    file.own.refuse_unless("draft_ffn_type", ("dense",), "dense FFNs")
    missing = [key for key, size in sizes.items() if size is None]
    if missing and (named or len(missing) < len(sizes)):
        raise ConfigError(f"{file.own.label}: {missing[0]} is missing; a DFlash2 draft model needs it")
    taps, group, rank, top_k = sizes.values()
    if taps is None or group is None or rank is None or top_k is None:
        return {}
    if hidden_size % group:
        raise ConfigError(f"{file.own.label}: conv_group_size {group} does not divide hidden_size {hidden_size}")
    return {"conv": LocalConv(taps, group), "selector": Selector(rank, top_k)}


def _softcap(file: BlockFile) -> float | None:
    """The softcap of logits, from any object that has it; None without one."""
    places = {id(place): place for place in (file.own, file.layer, file.top)}.values()
    found = (place.optional_number("final_logit_softcapping", 0, 1e6) for place in places)
    return next((cap for cap in found if cap), None)


def _open(directory: Path, name: str) -> DraftTensors:
    checkpoint = Checkpoint.open(directory)
    stored: dict[str, str] = {}
    for each in checkpoint.entries:
        plain = each.removeprefix("model.")
        if plain in stored:
            raise ConfigError(f"{directory}: tensors {stored[plain]!r} and {each!r} are both {plain!r}")
        stored[plain] = each
    if "fc.weight" not in stored or "hidden_norm.weight" not in stored:
        missing = "fc.weight" if "fc.weight" not in stored else "hidden_norm.weight"
        raise ConfigError(f"{directory}: tensor {missing!r} is missing: this is no {name} draft model")
    return DraftTensors(checkpoint, stored, False)


def _boundaries(
    file: BlockFile, kind: BlockKind, target: ModelConfig, counts: tuple[int, int], override: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The boundaries whose streams fc reads. Raises ConfigError for missing, ambiguous or invalid ids.

    counts  features of fc, and the draft model's layers
    """
    last, (num_features, num_layers) = target.num_layers, counts
    outputs = file.layout != "speculators"
    key = "target_layer_ids" if outputs else "aux_hidden_state_layer_ids"
    lowest = -1 if file.layout == "deepspec" else 0
    found = file.own.optional_integers(key, lowest, last - 1 if outputs else last, max_count=MAX_FEATURES)
    if outputs:
        if found is None and file.layout == "z-lab":
            found = _default_ids(last, num_layers)
        if found is not None and max(found, default=0) == last - 1 and override is None:
            raise ConfigError(
                f"{file.own.label}: {key} = {list(found)}: layer {last - 1} is the target's last, whose hidden state "
                f"may be meant after the final norm or before it; {OVERRIDE}"
            )
        found = None if found is None else tuple(layer + 1 for layer in found)
    if override is not None:
        key, found = "capture_layers", override
    if not found:
        raise ConfigError(f"{file.own.label}: {key} is missing; a {kind.name} draft model needs it")
    if len(found) != num_features or not all(0 <= each <= last for each in found):
        raise ConfigError(
            f"{file.own.label}: {key}: expected {num_features} boundaries from 0 to the target's {last} layers, as "
            f"fc.weight has features, found {list(found)}"
        )
    return found


def _default_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """z-lab's default: ids spread evenly from layer 1 to layer L - 3; the middle one for a single layer."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + place * span / (num_layers - 1)) for place in range(num_layers))


def _vocabulary(file: BlockFile, tensors: DraftTensors, sizes: Sizes, target: ModelConfig) -> dict[str, Any]:
    """Do as `vocabulary_fields`; embedding and LM head may be the target's only if the widths agree."""
    found = vocabulary_fields(file.top, tensors, sizes, target)
    if sizes.hidden_size != target.hidden_size and not (found["own_lm_head"] and found["own_embedding"]):
        raise ConfigError(
            f"{file.top.label}: hidden_size {sizes.hidden_size} is not the target's {target.hidden_size}, whose "
            f"embedding or LM head it uses"
        )
    return found


def parse_dflash(
    directory: Path, target: ModelConfig, capture_layers: tuple[int, ...] | None
) -> tuple[DflashConfig, DraftTensors]:
    """Read a DFlash draft model's geometry and tensors; see `parse_block_model`."""
    return parse_block_model(directory, target, capture_layers, DFLASH)


def parse_block_model(
    directory: Path, target: ModelConfig, capture_layers: tuple[int, ...] | None, kind: BlockKind
) -> tuple[DflashConfig, DraftTensors]:
    """Read a draft model's geometry, and its tensors by name without `model.`; of the weights only headers are read.

    capture_layers  boundaries that override the config's
    Raises ConfigError for a draft model of another kind or for another target, and for features that are not
    implemented, such as projectors.
    """
    fields = with_layer_defaults(read_config(directory))
    file, tensors = _places(fields, kind), _open(directory, kind.name)
    _refuse_unimplemented(file, kind)
    sizes = parse_sizes(file.layer, default_vocab_size=target.vocab_size, default_max_position=target.max_position)
    check_target(file.top, target)
    num_layers = file.layer.integer("num_hidden_layers", 1, MAX_LAYERS)
    tensors.check_layers(num_layers, sizes.hidden_size, file.layer.label)
    entry = tensors.entry("fc.weight", 2)
    num_features, rest = divmod(entry.shape[1], target.hidden_size)
    if rest or not 1 <= num_features <= MAX_FEATURES:
        raise ConfigError(
            f"{entry.file}: tensor {entry.name!r}: expected columns 1 to {MAX_FEATURES} times the target's hidden_size "
            f"{target.hidden_size}, found {list(entry.shape)}"
        )
    config = kind.record(
        layout=file.layout,
        capture_boundaries=_boundaries(file, kind, target, (num_features, num_layers), capture_layers),
        mask_token=_mask_token(file, kind, target),
        block_size=_block_size(file),
        anchor_drafts=file.own.boolean("sample_from_anchor", kind.anchor_drafts),
        **kind.own(file),
        **_dflash2(file, sizes.hidden_size),
        quantisation=read_quantisation(file.top, directory) or read_quantisation(file.layer, directory),
        **_layer_fields(file, tensors, sizes, target),
        **_vocabulary(file, tensors, sizes, target),
    )
    style = layer_style(file.layer)
    harmless = HARMLESS_DRAFT_KEYS if style is None else HARMLESS_DRAFT_KEYS | style.harmless
    for place in {id(each): each for each in (file.top, file.layer, file.own)}.values():
        for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            place.optional_boolean(key)  # the tensors decide
        place.refuse_unknown(harmless)
    return config, tensors


def _mask_token(file: BlockFile, kind: BlockKind, target: ModelConfig) -> int:
    token = file.own.optional_integer("mask_token_id", 0, target.vocab_size - 1)
    if token is None:
        raise ConfigError(f"{file.own.label}: mask_token_id is missing; a {kind.name} draft model needs it")
    return token


def _block_size(file: BlockFile) -> int:
    """Read the rows of a block in training, the last known token's included, from one of two objects."""
    places = {id(place): place for place in (file.own, file.top)}.values()
    found = [size for place in places if (size := place.optional_integer("block_size", 2, MAX_BLOCK)) is not None]
    if not found or len(set(found)) > 1:
        raise ConfigError(f"{file.top.label}: expected one block_size, found {found or 'none'}")
    return found[0]
