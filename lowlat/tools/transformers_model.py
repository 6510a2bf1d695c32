"""This module runs a target with transformers, as another implementation to compare with.

transformers is optional: it is imported on use. If it is missing, a ConfigError says how to install it.
"""

from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.formats import StoredFormat
from lowlat.errors import ConfigError

__all__ = ["open_transformers", "transformers_version"]


def transformers_version() -> str:
    """Return the installed version. Raises ConfigError without transformers."""
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
    """Load a directory's model in a dtype, for evaluation.

    stored     the experts' format; transformers dequantises it if it can
    attention  its implementation; None: transformers chooses
    Raises ConfigError without transformers, or if it cannot load the target.
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
