"""This module opens the pairs that suites and peers measure: the bundled one, a directory, or a random geometry."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lowlat
from lowlat.errors import ConfigError
from lowlat.tools.bench.geometry import Geometry, read_geometries
from lowlat.tools.bench.subject import Subject, open_model, open_random

__all__ = ["DEMO", "known_geometry", "open_subject"]

DEMO = Path(lowlat.__file__).parent / "demo"


def known_geometry(name: str) -> Geometry:
    """A geometry by its name in the table. Raises ConfigError for another name."""
    known = read_geometries()
    if name not in known:
        raise ConfigError(f"no geometry {name!r:.80}; known: {', '.join(known)}")
    return known[name]


@contextmanager
def open_subject(
    options: Mapping[str, Any],
    *,
    geometry: str | None = None,
    model: Path | None = None,
    draft_model: Path | None = None,
    accept_length: float | None = None,
    drafts: bool = True,
    prompts: Path | None = None,
) -> Iterator[Subject]:
    """A subject: `geometry` or `model`, or the bundled pair where neither is named.

    options        fields of RuntimeConfig
    accept_length  tokens a drafted step that are imposed; None: the draft model's own
    drafts         write a random draft model for a geometry
    prompts        file to cut prompts from; None: the bundled pair's own, random tokens for others
    Raises ConfigError.
    """
    imposed: dict[str, Any] = {} if accept_length is None else {"simulated_accept_length": accept_length}
    if geometry is not None:
        if model is not None:
            raise ConfigError("give one of a geometry and a model")
        with tempfile.TemporaryDirectory(prefix="lowlat-bench-") as scratch:
            speculation = {**imposed} if draft_model is None else {"model": draft_model, **imposed}
            known = known_geometry(geometry)
            place = Path(scratch)
            yield open_random(geometry, known, speculation, options, scratch=place, drafts=drafts, prompts=prompts)
        return
    if model is None:
        model, draft_model = DEMO / "target", draft_model or DEMO / "head"
        prompts = prompts or DEMO / "prompts.json"
    drafting = {"model": draft_model, **imposed} if draft_model is not None else None
    yield open_model(model, drafting, options, prompts=prompts)
