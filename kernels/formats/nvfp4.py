"""NVFP4: blocks of 16 four-bit floats (E2M1) that share an e4m3 scale, and a float32 factor for a row.

A tensor's factor stands once for each row here: so matrices that are fused keep their own. The earlier number is in
the low nibble. Source: NVIDIA's and compressed-tensors' exports, which store the factor or what scales were divided by.
"""

from types import MappingProxyType

import torch

from lowlat.kernels.formats.base import MatrixFormat, Parts, Specs, check_part, tiles_of
from lowlat.kernels.formats.fp8 import decode_e4m3
from lowlat.kernels.formats.int4 import unpack_nibbles
from lowlat.kernels.formats.mxfp4 import MAGNITUDES

__all__ = ["FACTOR", "LEAST_SCALE", "NVFP4", "SCALE_BITS", "SCALE_STEP"]

BLOCK = 16
# A packed scale of NVFP4, times 2**4, and this make the bits of a bf16: the scale times 2**118. The smallest one's are
# those of 2**-9, all it takes to hold e4m3's subnormal numbers as others.
SCALE_STEP, SCALE_BITS = 1 << 4, 236 << 7
FACTOR = 2.0**8  # by which a row's factor is above its meaning, as numbers are below theirs
LEAST_SCALE = 118 << 3  # the bits of 2**-9 in bf16, less those of the mantissa that e4m3 lacks


class _Nvfp4(MatrixFormat):
    """Codes `nvfp4` [..., N, K / 2], `nvfp4_scales` [..., N, K / 16], both uint8, `nvfp4_factors` [..., N, 1] float32.

    A number is code times scale, which is exact, times the factor.
    """

    name = "nvfp4"
    parts = MappingProxyType({"nvfp4": 2, "nvfp4_scales": 0, "nvfp4_factors": 0})
    block = BLOCK

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`; the same in any compute dtype."""
        self.check_columns(columns)
        return {
            "nvfp4": ((rows, columns // 2), torch.uint8),
            "nvfp4_scales": ((rows, columns // BLOCK), torch.uint8),
            "nvfp4_factors": ((rows, 1), torch.float32),
        }

    def packed_bytes(self, rows: int, columns: int, *, wide: bool = True) -> int:
        """See `MatrixFormat.packed_bytes`."""
        height, width = tiles_of(rows, columns)
        return height * (width * (512 + 64) + 64)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `MatrixFormat.shape`."""
        *outer, half = parts["nvfp4"].shape
        return (*outer, 2 * half)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `MatrixFormat.dequantise`."""
        codes, scales, factors = parts["nvfp4"], parts["nvfp4_scales"], parts["nvfp4_factors"]
        *outer, half = codes.shape
        check_part("nvfp4_scales", scales, *outer, 2 * half // BLOCK)
        check_part("nvfp4_factors", factors, *outer, 1)
        table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32, device=codes.device)
        values = table[unpack_nibbles(codes).int()].reshape(*scales.shape, BLOCK)
        values *= decode_e4m3(scales)[..., None]
        return values.flatten(-2).mul_(factors).to(dtype)


NVFP4 = _Nvfp4()
