"""MXFP4: blocks of 32 four-bit floats (E2M1) that share one power of two (E8M0).

Canonical, a block is 16 bytes, the earlier value in the low nibble, and a byte of scale. Of a packed tile the codes are
512 bytes: a lane's four words, each of the eight codes that it has in one row and one block, so placed in the word that
masks, shifts and one product of integers make pairs of bf16 of them (`mxfp4_fragment`).
Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.1 to 5.3; the canonical packing is that of gpt-oss
checkpoints.
"""

from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.formats.base import Parts, Specs, WeightFormat, check_part
from lowlat.kernels.gemm.packing import TILE_ROWS

__all__ = ["BLOCK", "MAX_SCALE", "MXFP4", "SCALE_OFFSET", "dequantise", "pack_codes", "quantise", "unpack_codes"]

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8
SCALE_BIAS = 127
NAN_SCALE = 255
# Exact powers of two by scale; functions such as exp2 may miss them by a bit.
POWERS = (*(2.0 ** (scale - SCALE_BIAS) for scale in range(NAN_SCALE)), float("nan"))
# Halfway between neighbours; a tie goes to the magnitude whose code is even.
MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(MAGNITUDES))
# A packed scale is the exponent that a block's sum wants, which comes times 2**-63: see `mxfp4_fragment`. So the
# greatest is 191, for 2**64.
SCALE_OFFSET = 63
MIN_SCALE, MAX_SCALE, NEUTRAL_SCALE = 1, 254 - SCALE_OFFSET, 127
# A half-word holds four codes, the same places in both halves. Of each code: where its bits lie, from the lowest bit
# of its magnitude to its sign. The first three come to bits 6, 7, 8 and 15 by one shift to the left, the last one by
# a product with a number of three bits.
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11))
MAGNITUDE = 7


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Expand to plain numbers, code * 2 ** (scale - 127), exactly.

    blocks  [..., n / 32, 16]  uint8  two codes a byte, the earlier in the low nibble
    scales  [..., n / 32]      uint8  255 means NaN; what is past the dtype's range becomes infinite
    Returns [..., n] in `dtype`, float32 or bfloat16 (both hold every code at every scale up to 252).
    Raises ShapeError for shapes that do not fit each other.
    """
    check_part("blocks", blocks, *scales.shape, BLOCK // 2)
    device = blocks.device
    codes = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)
    pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), -1).to(device, dtype)
    powers = torch.tensor(POWERS, dtype=torch.float32).to(device, dtype)
    values = pairs.index_select(0, blocks.reshape(-1).int()).reshape(*scales.shape, BLOCK)
    values *= powers.index_select(0, scales.reshape(-1).int()).reshape(*scales.shape, 1)
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to MXFP4: to the nearest code, ties to the even code.

    weight  [..., n]  any float dtype, n a multiple of 32
    Returns blocks [..., n / 32, 16] uint8 and scales [..., n / 32] uint8. A block's scale puts its largest
    magnitude, rounded, at code 4 or 6; so what `dequantise` gave is kept exactly.
    Raises ShapeError for another n, ConfigError for numbers that are not finite.
    """
    if weight.ndim == 0 or weight.shape[-1] % BLOCK:
        raise ShapeError(f"MXFP4 needs rows of a multiple of {BLOCK} numbers, got shape {list(weight.shape)}")
    values = weight.float().reshape(*weight.shape[:-1], weight.shape[-1] // BLOCK, BLOCK)
    if not bool(values.isfinite().all()):
        raise ConfigError("MXFP4 cannot hold numbers that are not finite")
    largest = values.abs().amax(-1).double()
    fraction, exponent = torch.frexp(largest)  # fraction in [1/2, 1): four times a power of two is 1/2 here
    exponent = exponent - 3 + (fraction > 0.875)  # above 7 the nearest of 4, 6, 8, 12 is 8
    scales = (torch.where(largest > 0, exponent, 0) + SCALE_BIAS).clamp(0, NAN_SCALE - 1)
    powers = torch.tensor(POWERS, dtype=torch.float64, device=weight.device)[scales.long()]
    codes = _nearest_codes(values.double() / powers[..., None]).reshape(*values.shape[:-1], BLOCK // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scales.to(torch.uint8)


def _nearest_codes(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code of each number, uint8; magnitudes past 6 become 6."""
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, midpoint in enumerate(MIDPOINTS):
        above = magnitude > midpoint if code % 2 == 0 else magnitude >= midpoint
        codes += above.to(torch.uint8)
    return codes | (torch.signbit(scaled).to(torch.uint8) * SIGN)


class _Mxfp4(WeightFormat):
    """Blocks [..., N, K / 32, 16] and scales [..., N, K / 32], both uint8; packed scales are SCALE_OFFSET above these.

    A tile's scales are, of 8 rows in turn, two blocks of a row and two of the row 8 below.
    """

    name = "mxfp4"
    parts = MappingProxyType({"blocks": 2, "scales": 0})
    block = BLOCK
    word_dtype = torch.int32
    tile_words = 128
    scale_bytes = 32

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `WeightFormat.specs`; the same in any compute dtype."""
        self.check_columns(columns)
        scales = (rows, columns // BLOCK)
        return {"blocks": ((*scales, BLOCK // 2), torch.uint8), "scales": (scales, torch.uint8)}

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `WeightFormat.shape`."""
        *outer, width = parts["scales"].shape
        return (*outer, width * BLOCK)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `WeightFormat.dequantise`."""
        return dequantise(parts["blocks"], parts["scales"], dtype)

    def pack_into(
        self, parts: Parts, shape: tuple[int, int], order: torch.Tensor | None, words: torch.Tensor,
        scales: torch.Tensor | None, row_scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `WeightFormat.pack_into`; scales are 1 to 191, and others only where all 32 numbers are zero."""
        rows, width = shape[0], shape[1] // BLOCK
        check_part("blocks", parts["blocks"], rows, width, BLOCK // 2)
        check_part("scales", parts["scales"], rows, width)
        if scales is None:
            raise ShapeError("MXFP4 is packed to words and scales")
        blocks, powers = parts["blocks"].to(words.device), parts["scales"].to(words.device)
        if order is not None:
            order = order.to(words.device)
            blocks, powers = blocks[order], powers[order]
        powers = _checked_scales(blocks, powers) + SCALE_OFFSET
        extra_rows, extra_blocks = -rows % TILE_ROWS, width % 2
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, extra_blocks, 0, extra_rows))
        powers = torch.nn.functional.pad(powers, (0, extra_blocks, 0, extra_rows), value=NEUTRAL_SCALE + SCALE_OFFSET)
        high, wide = words.shape[:2]
        # tile, row half, group, step, block, quad, 4 bytes -> tile, step, group, quad, row half, block
        lanes = blocks.reshape(high, 2, 8, wide, 2, 4, 4).permute(0, 3, 2, 5, 1, 4, 6)
        words.copy_(pack_codes(lanes).reshape(high, wide, self.tile_words))
        # tile, row half, group, step, block -> tile, step, group, row half, block
        powers = powers.reshape(high, 2, 8, wide, 2).permute(0, 3, 2, 1, 4)
        scales.copy_(powers.reshape(high, wide, self.scale_bytes))

    def unpack(
        self, shape: tuple[int, int], words: torch.Tensor, scales: torch.Tensor | None,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `WeightFormat.unpack`."""
        if scales is None:
            raise ShapeError("MXFP4 is unpacked from words and scales")
        high, wide = words.shape[:2]
        lanes = unpack_codes(words.reshape(high, wide, 8, 4, 2, 2))
        blocks = lanes.permute(0, 4, 2, 1, 5, 3, 6).reshape(high * TILE_ROWS, wide * 2, BLOCK // 2)
        powers = scales.reshape(high, wide, 8, 2, 2).permute(0, 3, 2, 1, 4)
        powers = powers.reshape(high * TILE_ROWS, wide * 2) - SCALE_OFFSET
        return dequantise(blocks, powers, torch.bfloat16)[: shape[0], : shape[1]]

    def decode_fragment(self) -> tuple[Any, Any]:
        """See `WeightFormat.decode_fragment`; inputs come times 2**63."""
        from lowlat.kernels.formats import mxfp4_fragment  # needs Numba, which packing does not

        return mxfp4_fragment.as_multiplied, mxfp4_fragment.multiply_step

    def prefill_fragment(self, multiply: Any) -> Any:
        """See `WeightFormat.prefill_fragment`."""
        from lowlat.kernels.formats import mxfp4_fragment

        return mxfp4_fragment.make_multiply_tiles(multiply)

    def prefill_halves(self) -> tuple[Any, Any, Any]:
        """See `WeightFormat.prefill_halves`."""
        from lowlat.kernels.formats import mxfp4_fragment

        return mxfp4_fragment.hold_step, mxfp4_fragment.first_half, mxfp4_fragment.second_half


MXFP4 = _Mxfp4()


def pack_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Words of eight codes: [..., 4] uint8, two codes a byte, to [...] int32; byte p is pair p of the word."""
    words = torch.zeros(blocks.shape[:-1], dtype=torch.int32, device=blocks.device)
    for pair, places in enumerate(PLACES):
        byte = blocks[..., pair].to(torch.int32)
        for bit, place in enumerate(places):
            words |= ((byte >> bit) & 1) << place
            words |= ((byte >> (bit + 4)) & 1) << (place + 16)
    return words


def unpack_codes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`: [...] int32 to [..., 4] uint8."""
    pairs = []
    for places in PLACES:
        byte = torch.zeros_like(words)
        for bit, place in enumerate(places):
            byte |= ((words >> place) & 1) << bit
            byte |= ((words >> (place + 16)) & 1) << (bit + 4)
        pairs.append(byte.to(torch.uint8))
    return torch.stack(pairs, -1)


def _checked_scales(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scales, those of blocks of zeros made neutral where they are out of range."""
    strange = (scales < MIN_SCALE) | (scales > MAX_SCALE)
    if not bool(strange.any()):
        return scales
    used = strange & ((blocks & (MAGNITUDE | MAGNITUDE << 4)) != 0).any(-1)
    if bool(used.any()):
        raise ConfigError(
            f"scale {int(scales[used][0])} of an MXFP4 block; kernels take {MIN_SCALE} to {MAX_SCALE}, as one product "
            "in float32 applies them"
        )
    return torch.where(strange, NEUTRAL_SCALE, scales).to(torch.uint8)
