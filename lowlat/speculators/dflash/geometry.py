"""This module has the geometry of a DFlash draft model.

Source: DFlash, z-lab; vllm-project/speculators, `models/dflash`.
"""

from dataclasses import dataclass
from typing import ClassVar

from lowlat.models.geometry import DraftConfig

__all__ = ["DflashConfig", "LocalConv", "Selector"]


@dataclass(frozen=True)
class LocalConv:
    """The convolution along a block, before and after each layer's attention and FFN.

    taps   rows that contribute to a row: itself and those before it
    group  columns that share a coefficient
    """

    taps: int
    group: int


@dataclass(frozen=True)
class Selector:
    """The choice of a chain among the candidates of a block's rows.

    rank   of the score that the previous token gives a candidate
    top_k  candidates of a row
    """

    rank: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class DflashConfig(DraftConfig):
    """A draft model that fills a block of masks in one pass.

    mask_token      of rows whose token is unknown
    block_size      rows of a block, the last known token's included
    anchor_drafts   whether the last known token's row drafts, and so each row drafts the token after its own
    causal          [L] whether a row of the block attends to no later one in that layer; (): in no layer
    conv, selector  of DFlash2; None: there is none
    """

    method: ClassVar[str] = "dflash"
    mask_token: int
    block_size: int
    anchor_drafts: bool = False
    causal: tuple[bool, ...] = ()
    conv: LocalConv | None = None
    selector: Selector | None = None

    @property
    def context(self) -> str:
        """The heads that the target's features are projected to, "kv", or "k" if values are keys."""
        return self.attention.projected.removeprefix("q")

    @property
    def max_drafts(self) -> int:
        """The number of drafts of a block."""
        return self.block_size if self.anchor_drafts else self.block_size - 1
