"""Speculators that draft with a model share this base: what follows from its geometry alone."""

from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from lowlat.models.geometry import DraftConfig
from lowlat.speculators.base import Speculator

__all__ = ["ModelSpeculator"]

Geometry = TypeVar("Geometry", bound=DraftConfig)


@dataclass(frozen=True)
class ModelSpeculator(Speculator, Generic[Geometry]):
    """Drafts with a model, whose geometry is `config`."""

    config: Geometry

    @property
    def draft_config(self) -> Geometry:
        """The draft model's geometry."""
        return self.config

    def with_config(self, config: DraftConfig) -> Self:
        """The same with another geometry: layers rounded at load, or a rank's part."""
        if not isinstance(config, type(self.config)):
            raise ValueError(f"expected the geometry of a draft model of method {self.method!r}, found {config}")
        return replace(self, config=config)

    @property
    def attends_everything(self) -> bool:
        """Where a layer has no window."""
        return None in self.config.windows

    @property
    def waiting_boundaries(self) -> tuple[int, ...]:
        """Those that it captures."""
        return self.config.capture_boundaries
