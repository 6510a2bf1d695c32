"""This module has the base class of speculators with a draft model: everything that follows from its geometry."""

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
        """The same with another geometry, such as a quantised one or a rank's shard."""
        if not isinstance(config, type(self.config)):
            raise ValueError(f"expected the geometry of a draft model of method {self.method!r}, found {config}")
        return replace(self, config=config)

    @property
    def attends_everything(self) -> bool:
        """Whether a layer has no window."""
        return None in self.config.windows

    @property
    def waiting_boundaries(self) -> tuple[int, ...]:
        """The boundaries that it captures."""
        return self.config.capture_boundaries
