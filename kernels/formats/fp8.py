"""FP8: e4m3 numbers, one byte each, with a float32 scale for a row or for every 128 columns of it.

A scale of a whole tensor, or of a block of 128 rows, stands once for each row here: so matrices that are fused keep
their own. Source: OCP 8-bit Floating Point Specification 1.0, E4M3.

In registers a code's sign, four bits of exponent and three of mantissa, put at bits 15 and 10 to 4 of a bf16, are its
value times 2**-120, subnormal numbers too; one product brings it to its size, exactly. Scales of rows are the
epilogue's, those of 128 columns are applied to sums in decode and to numbers in prefill.
"""

from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats.base import DenseFormat, Fragment, Parts, Specs, check_part
from lowlat.kernels.formats.panels import group_scales, group_words, lanes_of, padding_of, put_after
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.tiles import TileFormat

__all__ = ["CODE_ORDER", "FP8", "FP8_BLOCK", "FP8_FORMATS", "decode_e4m3", "has_nan"]

LARGEST = 448.0
MAGNITUDE = 127  # also the magnitude that means NaN
PIECE_BYTES = 512  # of a step's codes: 16 bytes of each lane
# Of each e4m3 code of a word: bits, and how far they lie to the left of the lowest byte's.
MOVES = (
    ((0x80, 8), (0x7F, 4)),
    ((0x80, 24), (0x7F, 20)),
    ((0x80, 4), (0x70, 8), (0x0F, 0)),
    ((0x80, 20), (0x70, 24), (0x0F, 16)),
)
FIRST = 0x87F087F0  # where a code's bits belong, in both halves
# The second pair has the other bits of a half-word: the sign and the lower four bits of a code come to their places by
# a shift to the left, the upper three by one to the right.
LEFT, RIGHT = 0x80F080F0, 0x07000700
SIGNED_FIRST, SIGNED_LEFT = FIRST - (1 << 32), LEFT - (1 << 32)
TWO_TO_120 = 0x7B807B80  # twice, in bf16
# Where bits of the codes of a word come from, put together as bytes: the first pair's upper bytes, the second pair's
# lower ones. In a half-word bits 15 and 3 to 0 are where they belong, others to the left by 4, or to the right by 4, 8.
FROM_LEFT, FROM_RIGHT, FAR_RIGHT = 0x7F007F00, 0x00F000F0, 0x00700070
CODE_ORDER = (2, 0, 3, 1)  # the bytes of such a word, as columns of its four
MINUS_ZEROS = 0x80008000


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of e4m3 codes, uint8."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def has_nan(codes: torch.Tensor) -> bool:
    """Whether any of the e4m3 codes, uint8, is NaN."""
    return bool(((codes & MAGNITUDE) == MAGNITUDE).any())


class _Fp8(DenseFormat):
    """Codes `fp8` [..., N, K] uint8 and `fp8_scales` [..., N, G] float32; a number is its code times its scale.

    columns  of a row that share a scale; None: all, and G is 1
    """

    parts = MappingProxyType({"fp8": 1, "fp8_scales": 0})
    codes = "fp8"
    scales = "fp8_scales"

    def __init__(self, name: str, columns: int | None) -> None:
        self.name = name
        self.columns = columns

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`; the same in any compute dtype."""
        groups = 1 if self.columns is None else -(-columns // self.columns)
        return {"fp8": ((rows, columns), torch.uint8), "fp8_scales": ((rows, groups), torch.float32)}

    @property
    def narrow(self) -> bool:
        """See `DenseFormat.narrow`."""
        return self.columns is not None

    def tiles(self, *, wide: bool) -> TileFormat:
        """See `DenseFormat.tiles`: scales of rows stand once, others in every step."""
        if self.columns is None:
            return TileFormat(self.codes, 1024, row_scales=True)
        return TileFormat(self.codes, 1024, groups=1, wide=wide)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `MatrixFormat.shape`."""
        return tuple(parts["fp8"].shape)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `MatrixFormat.dequantise`; code times scale is rounded to float32 first."""
        codes, scales = parts["fp8"], parts["fp8_scales"]
        *outer, columns = codes.shape
        check_part("fp8_scales", scales, *outer, self.specs(1, columns, dtype)["fp8_scales"][0][1])
        if self.columns is not None:
            scales = scales.repeat_interleave(self.columns, -1)[..., :columns]
        return decode_e4m3(codes).mul_(scales).to(dtype)

    def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `DenseFormat.quantise`: by row; its largest magnitude is 448, ties go to even."""
        if self.columns is not None:
            return super().quantise(weight)
        values = weight.float()
        largest = values.abs().amax(-1, keepdim=True)
        if not bool(largest.isfinite().all()):
            raise ConfigError("FP8 cannot hold numbers that are not finite")
        scales = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"fp8": codes.view(torch.uint8), "fp8_scales": scales}

    def pack_panel(self, parts: Parts, tiles: TileFormat, steps: torch.Tensor, row_scales: torch.Tensor) -> None:
        """See `DenseFormat.pack_panel`: words of four codes, their bits where fragments take them from."""
        codes = torch.nn.functional.pad(parts["fp8"], padding_of(self.shape(parts), steps))
        plain = lanes_of(codes, steps).permute(0, 3, 1, 2, 5, 4, 6).contiguous().view(torch.int32)
        made = torch.zeros_like(plain)
        for byte, moves in enumerate(MOVES):
            for mask, place in moves:
                made |= ((plain >> (8 * byte)) & mask) << place
        steps[:, :, : tiles.code_bytes] = made.view(torch.uint8).reshape(*steps.shape[:2], tiles.code_bytes)
        if self.columns is None:
            row_scales.copy_(parts["fp8_scales"].reshape(-1))
        else:
            put_after(steps, tiles, group_words(parts["fp8_scales"], tiles, self.columns, steps))

    def unpack_panel(self, steps: torch.Tensor, tiles: TileFormat) -> torch.Tensor:
        """See `DenseFormat.unpack_panel`: numbers as fragments make them."""
        height, width, _ = steps.shape
        words, shape = steps[:, :, : tiles.code_bytes].contiguous().view(torch.int32), (height * TILE_ROWS, -1)
        second = ((words << 4) & SIGNED_LEFT) | ((words >> 4) & RIGHT)
        pairs = torch.stack((words & SIGNED_FIRST, second), -1).view(torch.bfloat16).flatten(-2).mul_(2.0**120)
        # tile, step, row half, row, quad, column half, 8 columns
        numbers = pairs.view(height, width, 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6)
        if tiles.row_scales:
            return numbers.reshape(shape)
        scales, _ = group_scales(steps, tiles)
        return (numbers.reshape(height, 2, 8, width, tiles.groups, -1) * scales).to(torch.bfloat16).reshape(shape)

    def fragment(self, tiles: TileFormat) -> Fragment:
        """See `CodedFormat.fragment`."""
        return _codes_fragment(tiles) if tiles.by_codes else _fragment(tiles)


FP8 = _Fp8("fp8", None)
FP8_BLOCK = _Fp8("fp8_block", 128)
FP8_FORMATS = (FP8, FP8_BLOCK)


def _fragment(tiles: TileFormat) -> Fragment:
    """How words of four e4m3 codes become pairs of bf16 in registers."""
    from lowlat.kernels.formats.fragment import make_group_scales, make_times
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    grouped = tiles.groups > 0

    @device_function
    def expand(word: Any) -> Any:
        """The two pairs of bf16 of a word of four codes."""
        first = word & uint32(FIRST)
        second = ((word << uint32(4)) & uint32(LEFT)) | ((word >> uint32(4)) & uint32(RIGHT))
        none = uint32(MINUS_ZEROS)
        return ptx.fma_bf16_pair(first, uint32(TWO_TO_120), none), ptx.fma_bf16_pair(second, uint32(TWO_TO_120), none)

    @device_function
    def load_half(weights: Any, half: Any, _words: Any) -> Any:
        w0, w1, w2, w3 = ptx.load_shared_128(weights)
        v0, v1, v2, v3 = ptx.load_shared_128(uint32(weights + uint32(PIECE_BYTES)))
        if half == 0:
            a0, a1 = expand(w0)
            a2, a3 = expand(w1)
            b0, b1 = expand(v0)
            b2, b3 = expand(v1)
        else:
            a0, a1 = expand(w2)
            a2, a3 = expand(w3)
            b0, b1 = expand(v2)
            b2, b3 = expand(v3)
        return a0, a1, a2, a3, b0, b1, b2, b3

    @device_function
    def load_group(weights: Any, half: Any, _top: Any, _low: Any) -> Any:
        return load_half(weights, half, weights)

    @device_function
    def take_nothing(_words: Any) -> Any:
        return uint32(0), uint32(0)

    def make_halves(four: Any, one: Any) -> tuple[Any, Any, Any]:
        times, scales = make_times(tiles), make_group_scales(tiles, one)

        @device_function
        def hold(step: Any, lane: Any) -> Any:
            at = uint32(lane * uint32(16))
            top, low = four(step, at), four(step, uint32(at + uint32(PIECE_BYTES)))
            if not grouped:
                return top, low
            return top, low, scales(step, uint32(uint32(lane >> uint32(2)) * uint32(4)), 0)

        @device_function
        def half(held: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
            top, low = expand(a) + expand(b), expand(c) + expand(d)
            if not grouped:
                return top + low
            return times(top, held[2][0]) + times(low, held[2][1])

        @device_function
        def first_half(held: Any) -> Any:
            return half(held, held[0][0], held[0][1], held[1][0], held[1][1])

        @device_function
        def second_half(held: Any) -> Any:
            return half(held, held[0][2], held[0][3], held[1][2], held[1][3])

        return hold, first_half, second_half

    @device_function
    def load_codes(words: Any) -> Any:
        a, b, c, d = ptx.load_shared_128(words)
        e, f, g, h = ptx.load_shared_128(uint32(words + uint32(PIECE_BYTES)))
        return a, b, c, d, e, f, g, h

    def make_expand(half: int) -> Any:
        first, second = 2 * half, 2 * half + 1

        @device_function
        def expand_codes(raw: Any, _top: Any, _low: Any) -> Any:
            a0, a1 = expand(raw[first])
            a2, a3 = expand(raw[second])
            b0, b1 = expand(raw[first + 4])
            b2, b3 = expand(raw[second + 4])
            return (a0, a1, a2, a3), (b0, b1, b2, b3)

        return expand_codes

    return Fragment(
        halves=make_halves, load_half=None if grouped else load_half, load_group=load_group if grouped else None,
        take_zeros=take_nothing, load_codes=load_codes, expand=make_expand, beside=lambda _group: take_nothing,
    )  # fmt: skip


def _codes_fragment(tiles: TileFormat) -> Fragment:
    """How words of four e4m3 codes become the bytes that tensor cores multiply, by the order of CODE_ORDER."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    step_bytes = tiles.step_bytes // 2  # of 64 columns, of which a step of codes is two

    @device_function
    def gather(word: Any) -> Any:
        lower = ptx.select_bits(word >> uint32(4), word >> uint32(8), uint32(FAR_RIGHT))
        upper = ptx.select_bits(word, uint32(word << uint32(4)), uint32(FROM_LEFT))
        return ptx.select_bits(upper, lower, uint32(FROM_RIGHT))

    def make_halves(four: Any, one: Any) -> tuple[Any, Any, Any]:
        @device_function
        def hold(step: Any, lane: Any) -> Any:
            return step, uint32(lane * uint32(16))

        @device_function
        def half(step: Any, at: Any) -> Any:
            a, b, c, d = four(step, at)
            e, f, g, h = four(step, uint32(at + uint32(PIECE_BYTES)))
            return gather(a), gather(b), gather(c), gather(d), gather(e), gather(f), gather(g), gather(h)

        @device_function
        def first_half(held: Any) -> Any:
            return half(held[0], held[1])

        @device_function
        def second_half(held: Any) -> Any:
            return half(held[0], uint32(held[1] + uint32(step_bytes)))

        return hold, first_half, second_half

    return Fragment(halves=make_halves)
