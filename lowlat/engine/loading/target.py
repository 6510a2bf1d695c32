"""This module opens the target, with weights, activations and KV in the formats that the options ask for."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.quantising import Quantiser
from lowlat.errors import ConfigError
from lowlat.models.activations import code_activations
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import OpenedTarget, code_kv, fetch_target, open_target, quantise_target
from lowlat.options.model_names import display_name
from lowlat.options.runtime import RuntimeConfig

__all__ = ["load_target"]

logger = logging.getLogger("lowlat")
Progress = Callable[[int, int], None]


def load_target(
    model: str | Path | OpenedTarget, options: RuntimeConfig, progress: Progress | None, downloaded: Progress | None
) -> OpenedTarget:
    """Open the target, with its config for the options' max_context; only the headers of its weights are read.

    model, progress, downloaded  see `lowlat.engine.loading.loading.load`
    Raises ConfigError.
    """
    target = model
    if not isinstance(target, OpenedTarget):
        fetched = fetch_target(target, dtype=options.dtype, progress=downloaded)
        target = open_target(fetched, dtype=options.dtype, progress=progress)
    if options.kv_cache_dtype == "fp8":
        target = code_kv(target)
    elif options.kv_cache_dtype == "bf16" and target.config.dtype != "bfloat16":
        raise ConfigError(f"kv_cache_dtype 'bf16' is of models that run in bfloat16, and this one runs in "
                          f"{target.config.dtype}: take 'auto', or dtype 'bfloat16'")  # fmt: skip
    if options.quantize is not None:
        target = quantise_target(target, Quantiser(options.quantize, options.quantize_lm_head))
    if options.activations is not None:
        target = replace(target, config=code_activations(target.config, display_name(target.directory)))
    target.config.check_context(options.max_context, target.directory / "config.json")
    _say_factors(target.config, options.max_context)
    return replace(target, config=target.config.for_context(options.max_context))


def _say_factors(config: ModelConfig, max_context: int) -> None:
    """Warn if max_context makes RoPE's long factors apply to short texts, too."""
    for rotation in config.rotations:
        trained = rotation.rope.original_max_position
        if rotation.rope.has_long_factors and max_context > trained:
            logger.warning(
                "max_context %d is above the trained context of %d tokens (original_max_position_embeddings): RoPE's "
                "long factors hold for all texts, shorter ones too, as other servers have it; --max-context %d has the "
                "short factors", max_context, trained, trained,
            )  # fmt: skip
            return
