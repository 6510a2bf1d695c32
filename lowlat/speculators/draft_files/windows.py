"""This module reads the sliding windows of a draft model's layers, and applies `draft_window` to them.

A row at position p of a layer with a window of W sees positions above p - W, its own included, drafted ones too. Which
layers have one is told by, in this order:

1. `layer_types`, an entry a layer: "sliding_attention" (speculators, vLLM).
2. `use_sliding_window`: true, layers from `max_window_layers` on, or all without it; false, none (transformers).
3. `sliding_window` alone: all layers; none in Qwen's, where the switch is off unless it is given.

`draft_window`, the caller's option, and a layer's own window: the smaller holds. A layer without one of its own then
keeps its first rows in sight as attention sinks; one that was trained with a window never saw them, and does not.
"""

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftConfig
from lowlat.models.hf_config import FULL, SLIDING

__all__ = ["check_draft_window", "draft_kv_windows", "draft_windows", "effective_window"]

KEEPS_FIRST = 4


def draft_windows(fields: Fields, num_layers: int, notes: list[str]) -> tuple[int | None, ...]:
    """The window of each layer, None for full attention. Raises ConfigError for what is contradictory or incomplete.

    notes  what the model's user should know is added
    """
    uses = fields.optional_boolean("use_sliding_window")
    size = fields.optional_integer("sliding_window", 0, 1 << 30) or None
    kinds = fields.optional_strings("layer_types", max_count=4096) or ()
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ConfigError(f"{fields.label}: layer_types entry {kind!r} is not implemented for draft models")
    if SLIDING in kinds:
        if len(kinds) != num_layers:
            raise ConfigError(f"{fields.label}: layer_types has {len(kinds)} entries for {num_layers} draft layers")
        if uses is False:
            raise ConfigError(f"{fields.label}: use_sliding_window is false, but layer_types has {SLIDING!r}")
        windowed = [kind == SLIDING for kind in kinds]
    elif kinds:
        windowed = [False] * num_layers
    elif uses:
        first = fields.integer("max_window_layers", 0, 1 << 16, default=0)
        windowed = [layer >= first for layer in range(num_layers)]
        if not any(windowed):
            notes.append(f"use_sliding_window is true, but max_window_layers is {first}: no layer has a window")
    else:
        family = fields.values.get("model_type")
        windowed = [size is not None and uses is None and family not in ("qwen2", "qwen3")] * num_layers
        if windowed[0] and family != "mistral":
            notes.append(f"sliding_window {size} without layer_types or use_sliding_window: taken for every layer")
    if any(windowed) and size is None:
        raise ConfigError(f"{fields.label}: sliding_window is missing; expected the window of the layers that slide")
    return tuple(size if slides else None for slides in windowed)


def check_draft_window(config: DraftConfig, draft_window: int | None) -> None:
    """Raise ConfigError for a `draft_window` over a layer, before the last, that attends to everything.

    Prefill computes such a layer's output for every row of a prompt, and its attention keeps no first rows.
    """
    if draft_window is not None and None in config.windows[:-1]:
        layer = config.windows.index(None)
        raise ConfigError(
            f"draft_window {draft_window} is not implemented for a draft model of {config.num_layers} layers of which "
            f"layer {layer} has no window of its own; leave draft_window out"
        )


def effective_window(own: int | None, draft_window: int | None) -> tuple[int | None, int]:
    """The window of a layer with one of its `own` under `draft_window`, and the first rows that it keeps in sight."""
    if own is not None:
        return own if draft_window is None else min(own, draft_window), 0
    return draft_window, 0 if draft_window is None else KEEPS_FIRST


def draft_kv_windows(config: DraftConfig, draft_window: int | None) -> tuple[int | None, ...]:
    """The window of each layer in which all lies that its rows see; None where they keep the first rows in sight."""
    each = (effective_window(own, draft_window) for own in config.windows)
    return tuple(None if keep_first else window for window, keep_first in each)
