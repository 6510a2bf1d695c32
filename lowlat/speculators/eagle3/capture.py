"""This module finds the boundaries whose residual streams an EAGLE3 draft model reads, in every convention.

Boundary b is the residual stream entering layer b. Boundary N, with N layers in the target, is the stream after the
last layer, before the final norm.

The rules follow the engines for which the published draft models were made:

1. `capture_layers`, the caller's option, gives boundaries as they are; repeats are allowed.
2. `eagle_aux_hidden_state_layer_ids` at the top level, in any project's files, and `eagle_config.layer_ids` are
   boundaries (vLLM).
3. `eagle_config.eagle_aux_hidden_state_layer_ids` names layers whose output is read, so boundary id + 1, if the first
   id is 1 or the draft model is a ModelOpt export. In files of SpecForge and SafeAILab other ids are boundaries
   (SGLang). An id equal to N can only be a boundary, and then all ids are boundaries (nvidia's gpt-oss v3).
4. `target_layer_ids` names layers whose output is read, so boundary id + 1. The last layer is never among them, since
   transformers returns its hidden state after the final norm (DeepSpec).
5. Without ids: boundaries 2, N // 2, N - 3 (SafeAILab; all other defaults are the same).
6. A draft model without auxiliary features reads one stream, boundary N, after the target's final norm.

Ids must not descend: all engines concatenate the captured streams in the order of the layers.
"""

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftLayout

__all__ = ["capture_boundaries", "default_boundaries"]

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
OUTPUTS_KEY = "target_layer_ids"
MAX_FEATURES = 16
OVERRIDE = "give capture_layers, the boundaries themselves"


def _check(label: str, ids: tuple[int, ...], num_layers: int, num_features: int) -> None:
    if len(ids) != num_features:
        raise ConfigError(
            f"{label} = {list(ids)}: expected {num_features} entries, as the draft model has features, found {len(ids)}"
        )
    for layer in ids:
        if not 0 <= layer <= num_layers:
            raise ConfigError(
                f"{label} = {list(ids)}: expected boundaries from 0 to the target's {num_layers} layers, found {layer}"
            )


def default_boundaries(num_layers: int) -> tuple[int, int, int] | None:
    """The default boundaries; None for fewer than 7 layers, since the three would not be different streams."""
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else None


def _from_config(
    fields: Fields, eagle: Fields | None, layout: DraftLayout, num_layers: int
) -> tuple[str, tuple[int, ...]]:
    """The boundaries that the config names, or the default, and their source for messages."""
    found: list[tuple[str, tuple[int, ...]]] = []
    places = [(fields, IDS_KEY, True)]
    if eagle is not None:
        places += [(eagle, "layer_ids", True), (eagle, IDS_KEY, layout == "speculators")]
    for place, key, are_boundaries in places:
        ids = place.optional_integers(key, 0, num_layers, max_count=MAX_FEATURES)
        if ids:
            if not are_boundaries:
                outputs = ids[0] == 1 or layout == "modelopt"
                ids = tuple(layer + 1 for layer in ids) if outputs and max(ids) < num_layers else ids
            found.append((f"{place.label}: {key}", ids))
    outputs_of = fields.optional_integers(OUTPUTS_KEY, 0, num_layers - 1, max_count=MAX_FEATURES)
    if outputs_of:
        if max(outputs_of) == num_layers - 1:
            raise ConfigError(
                f"{fields.label}: {OUTPUTS_KEY} = {list(outputs_of)}: layer {num_layers - 1} is the target's last, "
                f"whose hidden state may be meant after the final norm or before it; {OVERRIDE}"
            )
        found.append((f"{fields.label}: {OUTPUTS_KEY}", tuple(layer + 1 for layer in outputs_of)))
    if not found:
        default = default_boundaries(num_layers)
        if default is None:
            raise ConfigError(
                f"{fields.label}: {IDS_KEY} is missing, and its default (2, N / 2, N - 3) needs a target of 7 layers "
                f"or more, found {num_layers}; {OVERRIDE}"
            )
        return f"{fields.label}: the default {IDS_KEY}", default
    for label, ids in found[1:]:
        if ids != found[0][1]:
            raise ConfigError(
                f"{found[0][0]} means boundaries {list(found[0][1])}, {label} means {list(ids)}; {OVERRIDE}"
            )
    return found[0]


def capture_boundaries(
    fields: Fields,
    eagle: Fields | None,
    layout: DraftLayout,
    *,
    num_layers: int,
    num_features: int,
    override: tuple[int, ...] | None,
    final_hidden: bool = False,
) -> tuple[int, ...]:
    """The boundaries whose streams the draft model concatenates, by the rule in the module's docstring.

    eagle is the config's eagle_config; num_features is fc's columns over the target's width, or 1 with final_hidden,
    where the draft model has no auxiliary features and ids mean nothing. Raises ConfigError for ids out of range,
    descending, or of another count than num_features.
    """
    if override is not None:
        label, ids = "capture_layers", override
    elif final_hidden:
        label, ids = "the final hidden state", (num_layers,)
    else:
        label, ids = _from_config(fields, eagle, layout, num_layers)
    _check(label, ids, num_layers, num_features)
    if override is None and list(ids) != sorted(ids):
        raise ConfigError(f"{label} = {list(ids)}: expected ascending ids; {OVERRIDE}")
    return ids
