"""The geometry of a DFlash draft model. Source: DFlash, z-lab; vllm-project/speculators, `models/dflash`."""

from dataclasses import dataclass
from typing import ClassVar

from lowlat.models.geometry import DraftConfig

__all__ = ["DflashConfig"]


@dataclass(frozen=True, kw_only=True)
class DflashConfig(DraftConfig):
    """A draft model that fills a block of masks in one pass.

    mask_token     of rows whose token is not known
    block_size     rows of a block, the last known token's included
    anchor_drafts  whether the last known token's row drafts, and each row the token after its own
    """

    method: ClassVar[str] = "dflash"
    mask_token: int
    block_size: int
    anchor_drafts: bool = False

    @property
    def context(self) -> str:
        """The heads that the target's features are projected to, of k and v: values may be keys."""
        return self.attention.projected.removeprefix("q")

    @property
    def max_drafts(self) -> int:
        """Drafts of a block."""
        return self.block_size if self.anchor_drafts else self.block_size - 1
