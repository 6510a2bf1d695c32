"""This module reads the sliding windows of a draft model's layers, and applies `draft_window` to them.

In a layer with a window of W, a row at position p attends to positions above p - W, its own and drafted ones included.
The first of these keys that is present decides which layers have a window:

1. `layer_types`, one entry for each layer: "sliding_attention" (speculators, vLLM).
2. `use_sliding_window`: if true, layers from `max_window_layers` on, or all without that key; if false, no layer
   (transformers).
3. `sliding_window` alone: all layers. In Qwen's files no layer, since `use_sliding_window` is false by default there.

Of `draft_window`, the caller's option, and a layer's own window the smaller one applies. With `draft_window` a layer
without its own window also attends to its first rows, as attention sinks. A layer that was trained with a window never
attended to them, and does not.
"""

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftConfig
from lowlat.models.hf_config import FULL, SLIDING

__all__ = ["check_draft_window", "draft_kv_windows", "draft_windows", "effective_window"]

KEEPS_FIRST = 4


def draft_windows(fields: Fields, num_layers: int, notes: list[str]) -> tuple[int | None, ...]:
    """Read the window of each layer, None for full attention. Raises ConfigError for contradictory or missing keys.

    notes  facts that the model's user should know are appended to it
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
    """Raise ConfigError if `draft_window` would apply to a layer before the last without its own window.

    Prefill computes such a layer's output for every row of a prompt, and prefill's attention has no attention sinks.
    """
    if draft_window is not None and None in config.windows[:-1]:
        layer = config.windows.index(None)
        raise ConfigError(
            f"draft_window {draft_window} is not implemented for a draft model of {config.num_layers} layers of which "
            f"layer {layer} has no window of its own; leave draft_window out"
        )


def effective_window(own: int | None, draft_window: int | None) -> tuple[int | None, int]:
    """The window of a layer with window `own` under `draft_window`, and the number of its attention sinks."""
    if own is not None:
        return own if draft_window is None else min(own, draft_window), 0
    return draft_window, 0 if draft_window is None else KEEPS_FIRST


def draft_kv_windows(config: DraftConfig, draft_window: int | None) -> tuple[int | None, ...]:
    """The window of each layer that bounds what its rows attend to; None without a window, or with sinks."""
    each = (effective_window(own, draft_window) for own in config.windows)
    return tuple(None if keep_first else window for window, keep_first in each)
