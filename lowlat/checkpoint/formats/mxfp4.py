"""This module reads the MXFP4 of gpt-oss: each weight is stored as blocks and scales, two uint8 tensors.

Source: transformers integrations/mxfp4.
"""

from collections.abc import Mapping

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats.base import Matrices, StoredFormat
from lowlat.checkpoint.recipes import Arrange, Piece, Recipe
from lowlat.errors import ConfigError
from lowlat.kernels.formats import MXFP4

__all__ = ["STORED_MXFP4", "normalise_scales"]

MAX_MODULES = 4096

# A scale s stands for 2**(s - 127). If s >= 2, each product with an FP4 value (0.5 to 6) is a normal bfloat16 number;
# below, products are subnormal, and kernels that build the exponent from bits would differ. The kernels keep s + 63 in
# a byte that is an exponent, which is a valid number up to s = 191, for 2**64. 255 is NaN.
LOWEST_SCALE = 2
HIGHEST_SCALE = 191
UNIT_SCALE = 127
MAGNITUDE_BITS = 0x77  # both nibbles without sign bits


class _StoredMxfp4(StoredFormat):
    """MXFP4: `NAME_blocks` and `NAME_scales`, with outputs as rows even if the family transposes plain matrices."""

    packed = MXFP4
    method = "mxfp4"
    transformers_config = "Mxfp4Config"

    def check_quantization(self, fields: Fields) -> None:
        """See `StoredFormat.check_quantization`."""
        fields.optional_strings("modules_to_not_convert", max_count=MAX_MODULES)
        fields.refuse_unknown(())

    def recipes(self, matrices: Matrices, dtype: torch.dtype) -> list[Recipe]:
        """See `StoredFormat.recipes`."""
        count, rows, columns = matrices.shape
        arrange: Arrange = "deinterleave" if matrices.interleaved else "rows"
        return [
            Recipe(f"{matrices.weight}.{part}", (Piece(f"{matrices.stored}_{part}", (count, *shape)),), stored, arrange)
            for part, (shape, stored) in MXFP4.specs(rows, columns, dtype).items()
        ]

    def check_parts(self, labels: Mapping[str, str], parts: Mapping[str, torch.Tensor]) -> None:
        """See `normalise_scales`."""
        normalise_scales(labels["scales"], parts["blocks"], parts["scales"])


def normalise_scales(label: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Refuse MXFP4 scales with which kernels do not compute exactly; give all-zero blocks a valid scale.

    blocks  [E, rows, K / 32, 16]  uint8  two codes a byte, the low nibble first
    scales  [E, rows, K / 32]      uint8  in and out: blocks of zeros outside 2..191 get 127, their value unchanged
    label   file and tensor, for messages
    Raises ConfigError for the first scale that is NaN (255), or outside 2..191 with codes that are not zero.
    """
    low, high = torch.aminmax(scales)
    if int(low) >= LOWEST_SCALE and int(high) <= HIGHEST_SCALE:
        return
    outside = (scales < LOWEST_SCALE) | (scales > HIGHEST_SCALE)
    live = ((blocks[outside] & MAGNITUDE_BITS) != 0).any(dim=-1)
    refused = live | (scales[outside] == 255)
    if bool(refused.any()):
        at = outside.nonzero()[refused][0].tolist()
        raise ConfigError(
            f"{label}: expected MXFP4 scales from {LOWEST_SCALE} to {HIGHEST_SCALE}, "
            f"found {int(scales[tuple(at)])} in expert {at[0]}"
        )
    scales[outside] = UNIT_SCALE


STORED_MXFP4 = _StoredMxfp4()
