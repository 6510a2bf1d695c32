"""This module finds the layout of an EAGLE3 draft model's config.json, and the objects in it that may have a key.

    layout        recognised by                                  names          layers' sizes in
    speculators   speculators_model_type                         layers.0.      transformer_layer_config
    deepspec      an architecture of it or target_layer_ids           layers.0.      the top level
    specforge     midlayer, LlamaForCausalLMEagle3 or eagle_config  midlayer.   the top level
    safeai        midlayer, neither of them                      midlayer.      the top level
    modelopt      layers.0 or midlayer.0, none of the above      layers.0.      the top level

Source: SafeAILab/EAGLE, SpecForge, TensorRT Model Optimizer, speculators and DeepSpec.
"""

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftLayout
from lowlat.speculators.draft_files.tensors import DraftTensors
from lowlat.speculators.draft_layers import with_layer_defaults
from lowlat.speculators.eagle3.capture import OUTPUTS_KEY
from lowlat.speculators.eagle3.tensors import MASK_HIDDEN

__all__ = ["DEEPSPEC", "DraftFile"]

DEEPSPEC = ("Qwen3Eagle3Model", "Gemma4Eagle3Model")
KINDS = {"eagle3": False, "peagle": True}  # whether rows may have unknown tokens, which `mask_hidden` shows


class DraftFile:
    """Has the objects of a config: the top level, the layers' sizes, eagle_config; and the notes for the user."""

    def __init__(self, fields: Fields, tensors: DraftTensors) -> None:
        self.top = fields
        self.layout = _layout(fields, tensors)
        nested = fields.optional_object("transformer_layer_config")
        if self.layout == "speculators" and nested is None:
            raise ConfigError(f"{fields.label}: transformer_layer_config is missing; speculators' heads have it")
        if self.layout != "speculators" and nested is not None:
            raise ConfigError(f"{fields.label}: transformer_layer_config without speculators_model_type is not known")
        self.layer = fields if nested is None else with_layer_defaults(nested)
        self.eagle = fields.optional_object("eagle_config")
        self.notes: list[str] = []

    def places(self) -> list[Fields]:
        """The objects that may have a flag; all that have it must agree."""
        places = [self.top] if self.layer is self.top else [self.top, self.layer]
        return places if self.eagle is None else [*places, self.eagle]

    def flag(self, key: str) -> bool | None:
        """Read a flag from any object that has it; None if none has. Raises ConfigError for a contradiction."""
        values = {place.label: place.optional_boolean(key) for place in self.places()}
        given = {label: value for label, value in values.items() if value is not None}
        if len(set(given.values())) > 1:
            raise ConfigError(
                f"{key} is contradictory: " + ", ".join(f"{value} in {at}" for at, value in given.items())
            )
        return next(iter(given.values()), None)


def _layout(fields: Fields, tensors: DraftTensors) -> DraftLayout:
    kind = fields.optional_string("speculators_model_type")
    if kind is not None:
        if kind not in KINDS:
            raise ConfigError(f"{fields.label}: speculators_model_type must be 'eagle3' or 'peagle', found {kind!r}")
        if KINDS[kind] != (MASK_HIDDEN in tensors):
            found = "there" if MASK_HIDDEN in tensors else "missing"
            raise ConfigError(
                f"{fields.label}: speculators_model_type is {kind!r}, but tensor 'mask_hidden' is {found}"
            )
        return "speculators"
    architectures = fields.optional_strings("architectures", max_count=16) or ()
    if set(DEEPSPEC) & set(architectures) or fields.values.get(OUTPUTS_KEY):
        return "deepspec"
    if not tensors.has_midlayer:
        return "modelopt"
    named = "LlamaForCausalLMEagle3" in architectures
    return "specforge" if named or fields.values.get("eagle_config") else "safeai"
