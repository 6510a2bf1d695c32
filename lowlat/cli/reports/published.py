"""This module makes the report of `lowlat models`: families, their published models, and the formats that fit."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from lowlat.checkpoint.formats import STORED_FORMATS
from lowlat.checkpoint.formats.methods import METHODS
from lowlat.checkpoint.quantising import Quantiser
from lowlat.cli.reports.sizes import plan_runtime
from lowlat.engine.memory.plan import available_bytes, memory_need
from lowlat.lowering.covers import uncovered
from lowlat.models.families import FAMILIES
from lowlat.models.published import PUBLISHED, Published
from lowlat.models.target import read_model_config, rounding
from lowlat.models.weight_plan import WeightPlan, weight_plan
from lowlat.options.runtime import options_from

__all__ = ["markdown", "models_report"]

CONTEXT = 2048
ROUNDED: tuple[Literal["fp8", "int4"], ...] = ("fp8", "int4")


def models_report() -> dict[str, Any]:
    """All families by model_type, and published models with their sizes; nothing is fetched.

    "bytes" has the bytes of the weights by format: as published ("stored"), and rounded at load. "fits" lists the
    formats whose weights alone are smaller than the GPU's free memory. Without a GPU it is this machine's memory; its
    executor expands weights, so no format is smaller than the published one, and "expanded_bytes" has the size.
    "quant_methods" lists the quantisations of published files that are supported.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = available_bytes(device)
    return {
        "families": list(FAMILIES),
        "quant_methods": [*METHODS, *(each.method for each in STORED_FORMATS.values() if each.method)],
        "device": str(device),
        "free_bytes": free,
        "models": [_model(each, free, device) for each in PUBLISHED],
    }


def _model(published: Published, free: int | None, device: torch.device) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(published.config), encoding="utf-8")
        config = read_model_config(directory)
        options = options_from({"max_batch": 1, "max_context": CONTEXT, "device": "cpu"})
        plan = plan_runtime(Path(directory), options, None)
    program = plan.program(1, 0)
    reason = uncovered([program], plan.weights)
    sizes = {"stored": _num_bytes(weight_plan(config))}
    if config.quantisation is None and (config.experts is None or config.experts.weight_format == "bf16"):
        for kind in ROUNDED:
            sizes[kind] = _num_bytes(weight_plan(rounding(config, Quantiser(kind), published.name)))
    expanded = memory_need([program], plan.weights, torch.device("cpu")).weights_bytes
    own = sizes if device.type == "cuda" else {"stored": expanded}
    return {
        "model": published.name,
        "family": published.family,
        "max_context": config.max_context,
        "executor": "kernels" if reason is None else "reference",
        "reason": reason,
        "bytes": sizes,
        "expanded_bytes": expanded,
        "draft_models": list(published.drafts),
        "fits": [kind for kind, size in own.items() if free is None or size < free],
    }


def _num_bytes(plan: WeightPlan) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in plan.values())


def markdown(report: dict[str, Any]) -> str:
    """The table of models, without what depends on this machine."""
    lines = ["| model | family | GB | FP8 | INT4 | runs on | draft models |", "|---|---|---|---|---|---|---|"]
    for each in report["models"]:
        sizes = each["bytes"]
        giga = [f"{sizes[kind] / 1e9:.1f}" if kind in sizes else "" for kind in ("stored", *ROUNDED)]
        drafts = ", ".join("its own MTP layer" if name == "mtp" else name for name in each["draft_models"])
        lines.append(f"| {each['model']} | `{each['family']}` | {' | '.join(giga)} | {each['executor']} | {drafts} |")
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)
