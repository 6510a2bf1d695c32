"""This module runs the other implementation: transformers for the target, plain torch for the draft model.

transformers runs the recorded tokens in one pass without a cache, on the CPU.
"""

from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.formats import STORED_FORMATS, StoredFormat
from lowlat.errors import ConfigError
from lowlat.models.target import read_model_config
from lowlat.speculators.eagle3.config import EAGLE3, DraftKind, read_draft_config
from lowlat.speculators.methods import draft_method
from lowlat.speculators.peagle.config import PEAGLE
from lowlat.speculators.peagle.geometry import PeagleConfig
from lowlat.tools.compare.draft_model import PlainDraftModel
from lowlat.tools.compare.recording import Recording
from lowlat.tools.transformers_model import open_transformers

__all__ = ["expected_recording"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def expected_recording(
    found: Recording, target: str | Path, head: str | Path | None, dtype: str = "float32"
) -> Recording:
    """Compute the expected values of a recording's stages, for the same tokens and drafts.

    dtype is "auto", "float32" or "bfloat16", as in the recording. Raises ConfigError without transformers, or if it
    cannot load the target.
    """
    config = read_model_config(target, dtype=dtype)
    compute = DTYPES[config.dtype]
    stored = STORED_FORMATS["bf16" if config.experts is None else config.experts.weight_format]
    stages = _target_stages(found, Path(target), compute, stored)
    draft = None if head is None else read_draft_config(head, config, kind=_kind(head))
    if draft is not None and draft.quantisation is not None:
        raise ConfigError(f"{head}: comparing a quantised draft model is not implemented; leave it out")
    if head is not None and draft is not None and found.positions:
        plain = PlainDraftModel.load(draft, head, target, compute, config.rms_norm_eps)
        stages.update(_head_stages(found, plain, stages, compute))
    rounded = {name: rows.float() for name, rows in stages.items()}
    return Recording(found.tokens, found.num_prompt, found.positions, found.drafts, rounded)


def _kind(head: str | Path) -> DraftKind:
    """Return how to read a draft model: as P-EAGLE's if its config says so, else as EAGLE3's, which refuses others."""
    return PEAGLE if draft_method(head) == PeagleConfig.method else EAGLE3


@torch.no_grad()
def _target_stages(found: Recording, target: Path, dtype: torch.dtype, stored: StoredFormat) -> dict[str, torch.Tensor]:
    model = open_transformers(target, dtype, stored, attention="eager")
    rows: dict[str, torch.Tensor] = {}

    def keep(stage: str) -> Any:
        def hook(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            rows[stage] = (arguments[0] if arguments else keywords["hidden_states"])[0].clone()

        return hook

    layers = model.model.layers
    for boundary, module in enumerate([*layers, model.model.norm]):
        module.register_forward_pre_hook(keep(f"target.residual.{boundary}"), with_kwargs=True)
    model.lm_head.register_forward_pre_hook(keep("target.pre_head_hidden"), with_kwargs=True)
    logits = model(torch.tensor([found.tokens[:-1]]), use_cache=False).logits[0]
    first = found.num_prompt - 1
    rows["target.pre_head_hidden"] = rows["target.pre_head_hidden"][first:]
    rows["target.logits"] = logits[first:]
    return rows


@torch.no_grad()
def _head_stages(
    found: Recording, plain: PlainDraftModel, target: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Run the draft model over the other implementation's own residual streams."""
    captured = [target[f"target.residual.{boundary}"].to(dtype) for boundary in plain.config.capture_boundaries]
    features = plain.fc(captured)
    rows: dict[str, list[torch.Tensor]] = {}
    for position, drafts in zip(found.positions, found.drafts, strict=True):
        rows.setdefault("draft.fc_out", []).append(features[position])
        levels = plain.stages(found.tokens[: position + 2], features[: position + 1], drafts)
        for level, stages in enumerate(levels):
            for stage, row in stages.items():
                rows.setdefault(f"draft.{level}.{stage}", []).append(row)
    return {name: torch.stack(parts) for name, parts in rows.items()}
