"""MXFP4: blocks of 32 four-bit floats (E2M1) that share one power of two (E8M0).

Canonical, a block is 16 bytes, the earlier value in the low nibble, and a byte of scale. Of a packed tile the codes are
512 bytes: a lane's four words, each of the eight codes that it has in one row and one block, so placed in the word that
masks, shifts and one product of integers make pairs of bf16 of them.

In registers a code's sign and its three bits of magnitude, put at bits 15 and 8 to 6 of a bf16, are its value times
2**-126; the lowest magnitudes are subnormal there, and mma reads those exactly. In decode, inputs come times 2**63
(exact for magnitudes below 2**64), so that products keep all bits for inputs from 2**-62 on. A block's sum of 32 is
2**-63 of what it stands for: packed scales are 63 above their meaning, and one multiply-add brings it to its size and
joins it to the sums. In prefill, codes become exact bf16: so every pair's sums are those of plain weights.
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

__all__ = [
    "BLOCK", "MAGNITUDES", "MAX_SCALE", "MXFP4", "SCALE_OFFSET", "dequantise", "make_decode", "pack_codes", "quantise",
    "unpack_codes",
]  # fmt: skip

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8
SCALE_BIAS = 127
NAN_SCALE = 255
# Exact powers of two by scale; functions such as exp2 may miss them by a bit.
POWERS = (*(2.0 ** (scale - SCALE_BIAS) for scale in range(NAN_SCALE)), float("nan"))
# Halfway between neighbours; a tie goes to the magnitude whose code is even.
MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(MAGNITUDES))
# A packed scale is the exponent that a block's sum wants, which comes times 2**-63. So the
# greatest is 191, for 2**64.
SCALE_OFFSET = 63
MIN_SCALE, MAX_SCALE, NEUTRAL_SCALE = 1, 254 - SCALE_OFFSET, 127
# A half-word holds four codes, the same places in both halves. Of each code: where its bits lie, from the lowest bit
# of its magnitude to its sign. The first three come to bits 6, 7, 8 and 15 by one shift to the left, the last one by
# a product with a number of three bits.
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11))
MAGNITUDE = 7
TWO_TO_63 = 0x5F005F00  # twice, in bf16
MINUS_ZEROS = 0x80008000
CODE = 0x81C081C0  # where a code's bits belong, in both halves
LAST_PAIR = 0x6C006C00  # where the fourth code of a half-word lies: bits 13, 14, 10 and the sign in 11
# shifted down by 7 these are bits 6, 7, 3 and 4: they stay, and bits 3 and 4 come to 8 and 15 as well. No two of the
# product's terms meet, in neither half: nothing is carried.
SPREAD = 1 | 1 << 5 | 1 << 11
EXPONENT = 0x7F800000
TWICE = 0x00800080  # a byte to the exponents of both halves
# A code times 2**-126 wants 2 to the scale less 1, whose exponent is 63 above the stored one. Stored ones from 192 on
# leave bf16 that way: they are applied in two parts.
ABOVE = 0x1F801F80
TOP_BITS = 0x80808080


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
        return _make_as_multiplied(), _make_multiply_step()

    def prefill_fragment(self, multiply: Any) -> Any:
        """See `WeightFormat.prefill_fragment`."""
        return _make_multiply_tiles(multiply)

    def prefill_halves(self) -> tuple[Any, Any, Any]:
        """See `WeightFormat.prefill_halves`."""
        return _make_halves()


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


def make_decode() -> Any:
    """A device function: the four pairs of bf16, times 2**-126, of a word of eight codes."""
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    @device_function
    def decode(word: Any) -> Any:
        first = word & uint32(CODE)
        second = (word << uint32(3)) & uint32(CODE)
        third = (word << uint32(6)) & uint32(CODE)
        last = (((word & uint32(LAST_PAIR)) >> uint32(7)) * uint32(SPREAD)) & uint32(CODE)
        return first, second, third, last

    return decode


def _make_scaled() -> Any:
    """A device function: a pair of bf16 times 2**63."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    @device_function
    def scaled(word: Any) -> Any:
        return ptx.fma_bf16_pair(word, uint32(TWO_TO_63), uint32(MINUS_ZEROS))

    return scaled


def _make_as_multiplied() -> Any:
    """A device function: a lane's inputs of a step, times 2**63."""
    from lowlat.kernels.toolchain.numba_cuda import device_function

    scaled = _make_scaled()

    @device_function
    def as_multiplied(words: Any) -> Any:
        a, b, c, d, e, f, g, h = words
        return scaled(a), scaled(b), scaled(c), scaled(d), scaled(e), scaled(f), scaled(g), scaled(h)

    return as_multiplied


def _make_multiply_step() -> Any:
    """A device function: a step of a tile, see `WeightFormat.decode_fragment`."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32

    decode = make_decode()

    @device_function
    def block(w: Any, v: Any, x0: Any, x1: Any, x2: Any, x3: Any) -> Any:
        """The product of 32 columns: w the codes of a row, v of the row 8 below; times 2**-63."""
        zero = float32(0)
        a0, a1, a2, a3 = decode(w)
        b0, b1, b2, b3 = decode(v)
        d0, d1, d2, d3 = ptx.mma_bf16(zero, zero, zero, zero, a0, b0, a1, b1, x0, x1)
        return ptx.mma_bf16(d0, d1, d2, d3, a2, b2, a3, b3, x2, x3)

    @device_function
    def multiply_step(sums: Any, words: Any, scales: Any, x: Any) -> Any:
        c0, c1, c2, c3 = sums
        # of a row the blocks 0 and 1, of the row 8 below the blocks 0 and 1
        w0, w1, w2, w3 = ptx.load_shared_128(words)
        powers = ptx.load_shared_u32(scales)
        d0, d1, d2, d3 = block(w0, w2, x[0], x[1], x[2], x[3])
        e0, e1, e2, e3 = block(w1, w3, x[4], x[5], x[6], x[7])
        top0 = ptx.float_of_bits((powers << uint32(23)) & uint32(EXPONENT))
        top1 = ptx.float_of_bits((powers << uint32(15)) & uint32(EXPONENT))
        low0 = ptx.float_of_bits((powers << uint32(7)) & uint32(EXPONENT))
        low1 = ptx.float_of_bits((powers >> uint32(1)) & uint32(EXPONENT))
        c0, c1 = ptx.fma_rn(d0, top0, c0), ptx.fma_rn(d1, top0, c1)
        c2, c3 = ptx.fma_rn(d2, low0, c2), ptx.fma_rn(d3, low0, c3)
        c0, c1 = ptx.fma_rn(e0, top1, c0), ptx.fma_rn(e1, top1, c1)
        return c0, c1, ptx.fma_rn(e2, low1, c2), ptx.fma_rn(e3, low1, c3)

    return multiply_step


def _make_expanded(*, twice: bool) -> Any:
    """A device function: eight numbers of a word of codes, exactly, as four words, from the word and its block's scale.

    twice  it takes every scale that packing takes, in two products; False: scales that are stored below 192
    """
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    decode, scaled = make_decode(), _make_scaled()
    if twice:

        @device_function
        def expanded_twice(word: Any, stored: Any) -> Any:
            power = uint32(uint32(stored & uint32(255)) * uint32(TWICE))
            a, b, c, d = decode(word)
            none = uint32(MINUS_ZEROS)
            return (
                ptx.fma_bf16_pair(scaled(a), power, none),
                ptx.fma_bf16_pair(scaled(b), power, none),
                ptx.fma_bf16_pair(scaled(c), power, none),
                ptx.fma_bf16_pair(scaled(d), power, none),
            )

        return expanded_twice

    @device_function
    def expanded(word: Any, stored: Any) -> Any:
        power = uint32(uint32(uint32(stored & uint32(255)) * uint32(TWICE)) + uint32(ABOVE))
        a, b, c, d = decode(word)
        none = uint32(MINUS_ZEROS)
        return (
            ptx.fma_bf16_pair(a, power, none),
            ptx.fma_bf16_pair(b, power, none),
            ptx.fma_bf16_pair(c, power, none),
            ptx.fma_bf16_pair(d, power, none),
        )

    return expanded


def _make_halves() -> tuple[Any, Any, Any]:
    """Device functions: a lane's words of codes of a step and their scales, and either half's numbers."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    tile_bytes = MXFP4.tile_bytes
    expanded, expanded_twice = _make_expanded(twice=False), _make_expanded(twice=True)

    @device_function
    def hold_step(step: Any, lane: Any) -> Any:
        """A lane's four words of codes of a step, and their blocks' scales: see `WeightFormat.prefill_halves`."""
        w0, w1, w2, w3 = ptx.load_shared_128(uint32(step + uint32(lane * uint32(16))))
        row = uint32(uint32(lane >> uint32(2)) * uint32(4))
        return w0, w1, w2, w3, ptx.load_shared_u32(uint32(uint32(step + uint32(tile_bytes)) + row))

    @device_function
    def half(top: Any, low: Any, powers: Any, later: Any) -> Any:
        """The words of half a step, of a row and of the row 8 below; later: bits to the scale of its first block."""
        if uint32(powers & (powers << uint32(1)) & uint32(TOP_BITS)) != uint32(0):
            a = expanded_twice(top, uint32(powers >> uint32(later)))
            b = expanded_twice(low, uint32(powers >> uint32(later + 16)))
        else:
            a, b = expanded(top, uint32(powers >> uint32(later))), expanded(low, uint32(powers >> uint32(later + 16)))
        return a + b

    @device_function
    def first_half(held: Any) -> Any:
        """A lane's words of the first half of a step."""
        return half(held[0], held[2], held[4], 0)

    @device_function
    def second_half(held: Any) -> Any:
        """A lane's words of the second half of a step."""
        return half(held[1], held[3], held[4], 8)

    return hold_step, first_half, second_half


def _make_multiply_tiles(multiply: Any) -> Any:
    """A device function: a step of two tiles, see `WeightFormat.prefill_fragment`."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    tile_bytes, scale_bytes = MXFP4.tile_bytes, MXFP4.scale_bytes
    expanded, expanded_twice = _make_expanded(twice=False), _make_expanded(twice=True)

    @device_function
    def multiply_codes_half(
        sums: Any, top: Any, low: Any, powers: Any, second_top: Any, second_low: Any, second_powers: Any, wide: Any,
        rows: Any, live: Any,
    ) -> Any:  # fmt: skip
        if wide:
            a, b = expanded_twice(top, powers), expanded_twice(low, uint32(powers >> uint32(16)))
            c = expanded_twice(second_top, second_powers)
            d = expanded_twice(second_low, uint32(second_powers >> uint32(16)))
        else:
            a, b = expanded(top, powers), expanded(low, uint32(powers >> uint32(16)))
            c = expanded(second_top, second_powers)
            d = expanded(second_low, uint32(second_powers >> uint32(16)))
        return multiply(sums, a, b, c, d, rows, live)

    @device_function
    def multiply_codes(sums: Any, words: Any, scales: Any, rows: Any, later_rows: Any, live: Any) -> Any:
        # of a row the blocks 0 and 1, of the row 8 below the blocks 0 and 1
        w0, w1, w2, w3 = ptx.load_shared_128(words)
        v0, v1, v2, v3 = ptx.load_shared_128(uint32(words + uint32(tile_bytes)))
        p, q = ptx.load_shared_u32(scales), ptx.load_shared_u32(uint32(scales + uint32(scale_bytes)))
        large = uint32(uint32((p & (p << uint32(1))) | (q & (q << uint32(1)))) & uint32(TOP_BITS))
        wide = large != uint32(0)
        sums = multiply_codes_half(sums, w0, w2, p, v0, v2, q, wide, rows, live)
        p, q = uint32(p >> uint32(8)), uint32(q >> uint32(8))
        return multiply_codes_half(sums, w1, w3, p, v1, v3, q, wide, later_rows, live)

    return multiply_codes
