"""NVFP4: blocks of 16 four-bit floats (E2M1) that share an e4m3 scale, and a float32 factor for a row.

A tensor's factor stands once for each row here: so matrices that are fused keep their own. The earlier number is in
the low nibble. Source: NVIDIA's and compressed-tensors' exports, which store the factor or what scales were divided by.

A code has two significant bits and a scale four, so their product is a bf16 number, exactly. In registers codes come
out of their words times 2**-126 and scales times 2**118: a number is 2**-8 of its meaning, and the factor, which the
epilogue applies, 2**8 of its own. A packed scale has five bits of exponent and three of mantissa; one multiply-add of
integers brings it to its place in a bf16, the least exponent's number too. Blocks of zeros have codes of zeros.
"""

from types import MappingProxyType
from typing import Any

import torch

from lowlat.kernels.formats.base import DenseFormat, Fragment, Parts, Specs, check_part
from lowlat.kernels.formats.fp8 import decode_e4m3
from lowlat.kernels.formats.int4 import unpack_nibbles
from lowlat.kernels.formats.mxfp4 import MAGNITUDES, make_decode, pack_codes, unpack_codes
from lowlat.kernels.formats.panels import four_bit_lanes, four_bit_rows, padding_of
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.tiles import TileFormat

__all__ = ["NVFP4"]

BLOCK = 16
WORD_BYTES, LANE_WORD_BYTES = 32, 128  # a word of eight rows after the codes, and where each lane has its own
TWICE, MINUS_ZEROS = 0x00010001, 0x80008000
# A packed scale of NVFP4, times 2**4, and this make the bits of a bf16: the scale times 2**118. The smallest one's are
# those of 2**-9, all it takes to hold e4m3's subnormal numbers as others.
SCALE_STEP, SCALE_BITS = 1 << 4, 236 << 7
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
        packed = packed.view(height, 2, 8, width, 4).permute(0, 3, 1, 2, 4)
        steps[:, :, tiles.code_bytes :] = packed.reshape(height, width, -1)

    def unpack_panel(self, steps: torch.Tensor, tiles: TileFormat) -> torch.Tensor:
        """See `DenseFormat.unpack_panel`: numbers are 2**-8 of what the scales of their rows make of them.

        They are made by their bits: a table would be copied to the device, which a capture forbids.
        """
        height, width, _ = steps.shape
        words = steps[:, :, : tiles.code_bytes].contiguous().view(torch.int32)
        codes = unpack_nibbles(unpack_codes(words)).to(torch.int16)
        numbers = four_bit_rows(((codes & 7) << 6 | (codes & 8) * -4096).view(torch.bfloat16).mul_(2.0**126), steps)
        scales = steps[:, :, tiles.code_bytes :].reshape(height, width, 2, 8, 4).permute(0, 2, 3, 1, 4)
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

    decode, code_bytes = make_decode(), tiles.code_bytes

    @device_function
    def scale_of(word: Any, shift: Any) -> Any:
        """A pair of bf16 of the packed scale in one byte of a word, times 2**118."""
        byte = (word >> shift) & uint32(0xFF)
        return uint32(byte * uint32(SCALE_STEP * TWICE) + uint32(SCALE_BITS * TWICE))

    @device_function
    def expand(word: Any, scale: Any) -> Any:
        """The four pairs of bf16 of a word of eight codes, times a scale."""
        a, b, c, d = decode(word)
        none = uint32(MINUS_ZEROS)
        return (
            ptx.fma_bf16_pair(a, scale, none),
            ptx.fma_bf16_pair(b, scale, none),
            ptx.fma_bf16_pair(c, scale, none),
            ptx.fma_bf16_pair(d, scale, none),
        )

    @device_function
    def load_half(weights: Any, half: Any, words: Any) -> Any:
        """Of the two blocks of a half a lane's columns are in the first for the first two lanes of a row."""
        w0, w1, v0, v1 = ptx.load_shared_128(weights)
        shift = uint32(uint32(half * 16) + ((uint32(cuda.threadIdx.x) & uint32(2)) << uint32(2)))
        top = scale_of(ptx.load_shared_u32(words), shift)
        low = scale_of(ptx.load_shared_u32(uint32(words + uint32(LANE_WORD_BYTES))), shift)
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
            top, low = one(step, at), one(step, uint32(at + uint32(WORD_BYTES)))
            return words, top, low, uint32((lane & uint32(2)) << uint32(2))

        @device_function
        def first_half(held: Any) -> Any:
            words, top, low, block = held
            return expand(words[0], scale_of(top, block)) + expand(words[2], scale_of(low, block))

        @device_function
        def second_half(held: Any) -> Any:
            words, top, low, block = held
            later = uint32(block + uint32(16))
            return expand(words[1], scale_of(top, later)) + expand(words[3], scale_of(low, later))

        return hold, first_half, second_half

    @device_function
    def load_codes(words: Any) -> Any:
        a, b, c, d = ptx.load_shared_128(words)
        return a, b, c, d, a, b, c, d

    def make_expand(half: int) -> Any:
        own, below, shift = half, 2 + half, 16 * half

        @device_function
        def expand_blocks(raw: Any, top: Any, low: Any) -> Any:
            place = uint32(uint32(shift) + ((uint32(cuda.threadIdx.x) & uint32(2)) << uint32(2)))
            return expand(raw[own], scale_of(top, place)), expand(raw[below], scale_of(low, place))

        return expand_blocks

    @device_function
    def load_scales(scales: Any) -> Any:
        """All scales of the step, of a row and of the row 8 below."""
        return ptx.load_shared_u32(scales), ptx.load_shared_u32(uint32(scales + uint32(WORD_BYTES)))

    return Fragment(
        halves=make_halves, load_half=load_half, load_codes=load_codes, expand=make_expand,
        beside=lambda _group: load_scales,
    )  # fmt: skip
