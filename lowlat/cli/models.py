"""This module finds models that the command line names: it downloads them, or reads only their configs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint import hub
from lowlat.cli.console import progress_bar
from lowlat.models.target import fetch_target, read_model_config
from lowlat.options.model_names import find_repository
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.methods import draft_method, fetch_speculator

__all__ = ["local_draft_model", "local_target", "outlined"]


@contextmanager
def _bar(model: str | Path) -> Iterator[hub.Progress | None]:
    """A bar of the bytes to fetch, where the model is a repository."""
    if find_repository(model) is None:
        yield None
        return
    with progress_bar(f"fetching {model}", as_bytes=True) as update:
        yield update


def local_target(model: Path, dtype: str = "auto") -> Path:
    """Return the directory of a target; a repository is downloaded. Raises ConfigError."""
    with _bar(model) as update:
        return fetch_target(model, dtype=dtype, progress=update)


def local_draft_model(model: Path, target: Path | None) -> Path:
    """Return the directory of a draft model; a repository is downloaded if it fits. Raises ConfigError."""
    with _bar(model) as update:
        if target is None or find_repository(model) is None:
            return hub.fetch(model, progress=update)
        options = fetch_speculator(
            SpeculativeConfig(model=model, method=draft_method(model)), read_model_config(target), update
        )
        return Path(str(options.model))


@contextmanager
def outlined(
    model: Path, speculative: SpeculativeConfig | None
) -> Iterator[tuple[hub.Outline, SpeculativeConfig | None, hub.Download | None]]:
    """A model and how to speculate with it, as directories without weights; and what fetching the draft model takes."""
    with hub.outline(model) as target:
        if speculative is None or speculative.model is None:
            yield target, speculative, None
            return
        with hub.outline(speculative.model) as draft:
            yield target, replace(speculative, model=draft.directory), draft.download
