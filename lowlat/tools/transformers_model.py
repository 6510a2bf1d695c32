"""This module runs a target by transformers, as another implementation to compare with.

transformers is optional: it is imported when it is asked for, and its absence is a ConfigError that says how to get it.
"""

from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.formats import StoredFormat
from lowlat.errors import ConfigError

__all__ = ["open_transformers", "transformers_version"]


def transformers_version() -> str:
    """The installed version. Raises ConfigError without transformers."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "comparing a target needs transformers, which is not installed: pip install 'transformers>=5', "
            "or compare with a recording (lowlat compare --against FILE)"
        ) from error
    return str(transformers.__version__)


def open_transformers(
    target: Path,
    dtype: torch.dtype,
    stored: StoredFormat,
    *,
    attention: str | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """The model of a directory in a dtype, for evaluation.

    stored     of the experts; formats that transformers can dequantise are
    attention  its implementation; None: the one that transformers chooses
    Raises ConfigError without transformers, or where it cannot load the target.
    """
    transformers_version()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    if attention is not None:
        options["attn_implementation"] = attention
    if stored.transformers_config is not None:
        options["quantization_config"] = getattr(transformers, stored.transformers_config)(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(target, **options)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ConfigError(
            f"transformers cannot load {target}: {error}; a quantised target can be compared with its plain original "
            "(lowlat compare --against MODEL)"
        ) from error
    return model.to(dtype).to(device).eval()
