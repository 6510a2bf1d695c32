"""This module has the geometry of a P-EAGLE draft model. Source: P-EAGLE (Amazon, 2026)."""

from dataclasses import dataclass
from typing import ClassVar

from lowlat.speculators.eagle3.geometry import Eagle3Config

__all__ = ["PeagleConfig"]


@dataclass(frozen=True, kw_only=True)
class PeagleConfig(Eagle3Config):
    """EAGLE3's geometry; rows whose token is unknown take `mask_token`."""

    method: ClassVar[str] = "peagle"
    mask_token: int
