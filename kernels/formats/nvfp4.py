"""NVFP4: blocks of 16 four-bit floats (E2M1) that share an e4m3 scale, and a float32 factor for a row.

A tensor's factor stands once for each row here: so matrices that are fused keep their own. The earlier number is in
the low nibble. Source: NVIDIA's and compressed-tensors' exports, which store the factor or what scales were divided by.

A code has two significant bits and a scale four, so their product is a bf16 number, exactly. In registers codes come
out of their words times 2**-126 and scales times 2**118: a number is 2**-8 of its meaning, and the factor, which the
epilogue applies, 2**8 of its own. A packed scale has five bits of exponent and three of mantissa; one multiply-add of
integers brings it to its place in a bf16, the least exponent's number too. Blocks of zeros have codes of zeros. After a
step's codes are two words for each pair of rows i and i + 8, one for each half of its columns: of the half's first
block the scales of both rows, then those of its second block. So a lane's two scales of a half lie side by side.
"""

from types import MappingProxyType
from typing import Any

import torch

from lowlat.kernels.formats.base import DenseFormat, Fragment, Parts, Specs, check_part
from lowlat.kernels.formats.fp8 import decode_e4m3
from lowlat.kernels.formats.int4 import unpack_nibbles
from lowlat.kernels.formats.mxfp4 import CODE, LAST_PAIR, MAGNITUDES, pack_codes, unpack_codes
from lowlat.kernels.formats.panels import four_bit_lanes, four_bit_rows, padding_of
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.tiles import WORD_BYTES, TileFormat

__all__ = ["NVFP4"]

BLOCK = 16
TWICE, MINUS_ZEROS = 0x00010001, 0x80008000
# A packed scale of NVFP4, times 2**4, and this make the bits of a bf16: the scale times 2**118. The smallest one's are
# those of 2**-9, all it takes to hold e4m3's subnormal numbers as others.
SCALE_STEP, SCALE_BITS = 1 << 4, 236 << 7
# Of a word of four scales, bytes 0 and 1, each with zeros above; the number from there to bytes 2 and 3, for a thread
# whose number has bit 1.
FIRST_BLOCK, TO_SECOND_BLOCK = 0x4140, 0x0101
# The fourth code of a half-word has its bits at 13, 14, 10 and the sign at 11. The upper half of a product with this
# number has them shifted right by 7 and by 2, the lower one left by 4: where CODE has ones, the magnitude and the sign.
# No two terms meet: nothing is carried.
SPREAD_WIDE = 1 << 25 | 1 << 30 | 1 << 4
FACTOR = 2.0**8  # by which a row's factor is above its meaning, as numbers are below theirs
LEAST_SCALE = 118 << 3  # the bits of 2**-9 in bf16, less those of the mantissa that e4m3 lacks


class _Nvfp4(DenseFormat):
    """Codes `nvfp4` [..., N, K / 2], `nvfp4_scales` [..., N, K / 16], both uint8, `nvfp4_factors` [..., N, 1] float32.

    A number is code times scale, which is exact, times the factor.
    """

    name = "nvfp4"
    parts = MappingProxyType({"nvfp4": 2, "nvfp4_scales": 0, "nvfp4_factors": 0})
    block = BLOCK
    codes = "nvfp4"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`; the same in any compute dtype."""
        self.check_columns(columns)
        return {
            "nvfp4": ((rows, columns // 2), torch.uint8),
            "nvfp4_scales": ((rows, columns // BLOCK), torch.uint8),
            "nvfp4_factors": ((rows, 1), torch.float32),
        }

    def tiles(self, *, wide: bool) -> TileFormat:
        """See `DenseFormat.tiles`: scales are codes, in two words."""
        return TileFormat(self.codes, 512, row_scales=True, block_words=2)

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

    def pack_panel(self, parts: Parts, tiles: TileFormat, steps: torch.Tensor, row_scales: torch.Tensor) -> None:
        """See `DenseFormat.pack_panel`: codes have the signs of their blocks' scales, or are zeros where these are."""
        (rows, columns), (height, width, _) = self.shape(parts), steps.shape
        padding, scales = padding_of((rows, columns), steps), parts["nvfp4_scales"]
        blocks = unpack_nibbles(parts["nvfp4"]).unflatten(-1, (scales.shape[-1], -1))
        signed = blocks ^ ((scales[..., None] & 128) >> 4)
        signed = torch.where((scales[..., None] & 127) == 0, signed & 8, signed).flatten(-2)
        lanes = four_bit_lanes(torch.nn.functional.pad(signed, padding), steps)
        words = pack_codes(lanes[..., 0::2] | (lanes[..., 1::2] << 4))
        steps[:, :, : tiles.code_bytes] = words.view(torch.uint8).reshape(height, width, tiles.code_bytes)
        row_scales.copy_((parts["nvfp4_factors"] * FACTOR).reshape(-1))
        packed = torch.nn.functional.pad(_packed_scales(scales), (0, width * 4 - columns // BLOCK, 0, padding[3]))
        packed = packed.view(height, 2, 8, width, 2, 2).permute(0, 3, 4, 2, 5, 1)  # a row's 8 below it is innermost
        steps[:, :, tiles.code_bytes :] = packed.reshape(height, width, -1)

    def unpack_panel(self, steps: torch.Tensor, tiles: TileFormat) -> torch.Tensor:
        """See `DenseFormat.unpack_panel`: numbers are 2**-8 of what the scales of their rows make of them.

        They are made by their bits: a table would be copied to the device, which a capture forbids.
        """
        height, width, _ = steps.shape
        words = steps[:, :, : tiles.code_bytes].contiguous().view(torch.int32)
        codes = unpack_nibbles(unpack_codes(words)).to(torch.int16)
        numbers = four_bit_rows(((codes & 7) << 6 | (codes & 8) * -4096).view(torch.bfloat16).mul_(2.0**126), steps)
        scales = steps[:, :, tiles.code_bytes :].reshape(height, width, 2, 8, 2, 2).permute(0, 5, 3, 1, 2, 4)
        scales = scales.reshape(height, 2, 8, width, 4)
        sizes = ((scales.to(torch.int16) * SCALE_STEP) + SCALE_BITS).view(torch.bfloat16) * 2.0**-126
        return (numbers.reshape(height, 2, 8, width, 4, 16) * sizes[..., None]).reshape(height * TILE_ROWS, -1)

    def fragment(self, tiles: TileFormat) -> Fragment:
        """See `CodedFormat.fragment`."""
        return _fragment(tiles)


NVFP4 = _Nvfp4()


def _packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Magnitudes of e4m3 scales with a bit more of exponent, as fragments take them; uint8, as they were."""
    bits = decode_e4m3(scales & 127).bfloat16().view(torch.int16) >> 4
    return (bits - LEAST_SCALE).clamp_(0, 255).to(torch.uint8)


def _fragment(tiles: TileFormat) -> Fragment:
    """How words of eight codes become pairs of bf16 in registers, times the scale of their block of 16."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, uint32

    code_bytes = tiles.code_bytes

    @device_function
    def scales_of(word: Any, thread: Any) -> Any:
        """A pair of bf16, times 2**118, of a row's scale and of the row 8 below's, from a half's word.

        A lane's columns are in the first block of a half for the first two lanes of a row.
        """
        bytes_of_block = uint32(uint32(FIRST_BLOCK) + (thread & uint32(2)) * uint32(TO_SECOND_BLOCK))
        pair = ptx.pick_bytes(word, bytes_of_block)
        return uint32(pair * uint32(SCALE_STEP) + uint32(SCALE_BITS * TWICE))

    @device_function
    def expand(word: Any, scale: Any) -> Any:
        """The four pairs of bf16 of a word of eight codes, times a scale, a pair of it."""
        none, code = uint32(MINUS_ZEROS), uint32(CODE)
        low, high = ptx.mul_wide(word & uint32(LAST_PAIR), uint32(SPREAD_WIDE))
        return (
            ptx.fma_bf16_pair(word & code, scale, none),
            ptx.fma_bf16_pair((word << uint32(3)) & code, scale, none),
            ptx.fma_bf16_pair((word << uint32(6)) & code, scale, none),
            ptx.fma_bf16_pair(ptx.xor_and(low, high, code), scale, none),
        )

    @device_function
    def load_half(weights: Any, half: Any, words: Any) -> Any:
        w0, w1, v0, v1 = ptx.load_shared_128(weights)
        pair = scales_of(ptx.load_shared_u32(uint32(words + uint32(half * WORD_BYTES))), uint32(cuda.threadIdx.x))
        top, low = ptx.both_low(pair), ptx.both_high(pair)
        if half == 0:
            a0, a1, a2, a3 = expand(w0, top)
            b0, b1, b2, b3 = expand(v0, low)
        else:
            a0, a1, a2, a3 = expand(w1, top)
            b0, b1, b2, b3 = expand(v1, low)
        return a0, a1, a2, a3, b0, b1, b2, b3

    def make_halves(four: Any, one: Any) -> tuple[Any, Any, Any]:
        @device_function
        def hold(step: Any, lane: Any) -> Any:
            words = four(step, uint32(lane * uint32(16)))
            at = uint32(uint32(code_bytes) + uint32(uint32(lane >> uint32(2)) * uint32(4)))
            return words, one(step, at), one(step, uint32(at + uint32(WORD_BYTES))), lane

        @device_function
        def half(top: Any, low: Any, word: Any, lane: Any) -> Any:
            pair = scales_of(word, lane)
            return expand(top, ptx.both_low(pair)) + expand(low, ptx.both_high(pair))

        @device_function
        def first_half(held: Any) -> Any:
            words, word, _, lane = held
            return half(words[0], words[2], word, lane)

        @device_function
        def second_half(held: Any) -> Any:
            words, _, word, lane = held
            return half(words[1], words[3], word, lane)

        return hold, first_half, second_half

    @device_function
    def load_codes(words: Any) -> Any:
        a, b, c, d = ptx.load_shared_128(words)
        return a, b, c, d, a, b, c, d

    def make_expand(half: int) -> Any:
        own, below = half, 2 + half

        @device_function
        def expand_blocks(raw: Any, first: Any, second: Any) -> Any:
            pair = scales_of(second if half else first, uint32(cuda.threadIdx.x))
            return expand(raw[own], ptx.both_low(pair)), expand(raw[below], ptx.both_high(pair))

        return expand_blocks

    @device_function
    def load_scales(scales: Any) -> Any:
        """All scales of the step, of the first half of its columns and of the second, of both rows."""
        return ptx.load_shared_u32(scales), ptx.load_shared_u32(uint32(scales + uint32(WORD_BYTES)))

    return Fragment(
        halves=make_halves, load_half=load_half, load_codes=load_codes, expand=make_expand,
        beside=lambda _group: load_scales,
    )  # fmt: skip
