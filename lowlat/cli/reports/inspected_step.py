"""This module makes the report of `lowlat inspect step` for a directory, a repository or a preset."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowlat.checkpoint import hub
from lowlat.cli.options import bundled, speculative_config
from lowlat.cli.paths import check_model
from lowlat.cli.reports.step import step_report
from lowlat.errors import ConfigError
from lowlat.options.directories import tuning_directory
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.tools.gpus import describe_gpu
from lowlat.tools.planned_step import PRESET_DRAFT_MODEL, has_draft_models, plan_step, preset_names, target_config

__all__ = ["inspect_step"]

USUAL_CONTEXT = 1024  # tokens of each request when the step runs


def inspect_step(
    model: Path | None,
    speculation: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    gpu: str,
    batch: int,
    context: int | None,
    full: bool,
) -> dict[str, Any]:
    """The report, see `step_report`. Raises ConfigError for what a runtime would refuse.

    model        None: the bundled pair
    speculation  options of SpeculativeConfig by key; None where they were not given
    given        options of RuntimeConfig; those that size it default to the usual ones, or what the step needs
    context      tokens of each request; None: 1024, or as many as fit
    """
    described = describe_gpu(gpu, tuning_directory())
    speculative = _speculative(speculation, model)
    with _outlined(model or bundled("target"), speculative) as (directory, fitted):
        config = target_config(directory, given.get("dtype", "auto"))
        config.check_context(context or 1, directory / "config.json", flag="--context")
        sizes = {
            "max_context": min(max(RuntimeConfig.max_context, context or 0), config.max_context),
            "max_batch": max(batch, RuntimeConfig.max_batch),
        }
        options = RuntimeConfig(**{**sizes, **given})
        length = min(USUAL_CONTEXT, options.max_context) if context is None else context
        for name, value in (("context", length), ("batch", batch)):
            most = getattr(options, f"max_{name}")
            if value > most:
                raise ConfigError(f"--{name} {value} exceeds max_{name} {most}; raise --max-{name}, or lower it")
        planned = plan_step(directory, fitted, options, described, batch=batch, context=length)
    return step_report(
        planned,
        lengths=[length] * batch,
        model="the bundled model" if model is None else str(model),
        draft_model=None if speculative is None or speculative.model is None else str(speculative.model),
        full=full,
    )


def _speculative(values: Mapping[str, Any], model: Path | None) -> SpeculativeConfig | None:
    """Return the SpeculativeConfig; by default with the bundled draft model, or with a preset's own."""
    own = bundled("head") if model is None else PRESET_DRAFT_MODEL if has_draft_models(str(model)) else None
    found = speculative_config(values, own)
    if found is not None and found.model is not None and Path(found.model) != PRESET_DRAFT_MODEL:
        check_model(found.model)
    return found


@contextmanager
def _outlined(model: Path, speculative: SpeculativeConfig | None) -> Iterator[tuple[Path, SpeculativeConfig | None]]:
    """Model and draft model as directories without weights, or as they are where they stand for a preset's."""
    with ExitStack() as stack:
        directory = model
        if str(model) not in preset_names():
            directory = stack.enter_context(hub.outline(model)).directory
        if speculative is not None and speculative.model not in (None, PRESET_DRAFT_MODEL):
            draft = stack.enter_context(hub.outline(str(speculative.model)))
            speculative = replace(speculative, model=draft.directory)
        yield directory, speculative
