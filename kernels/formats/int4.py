"""INT4: whole numbers from 0 to 15, two a byte, less a zero point, times a float32 scale for each group of a row.

The earlier number is in the low nibble. Without zero points of its own a group's is 8.

In registers a code in the lowest bits of bf16's 128 is 128 and the code; less 128 and the zero point it is the number,
exactly. Decode applies a group's scale to its sum. Its GEMMs multiply a quarter of each number, exactly as well, and
their sums by four at the end: powers of two change no rounding.
"""

from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.formats.base import DenseFormat, Fragment, Parts, Specs, check_part
from lowlat.kernels.formats.panels import (
    four_bit_lanes,
    four_bit_rows,
    group_scales,
    group_words,
    padding_of,
    put_after,
    row_pair,
    spread,
)
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.tiles import WORD_BYTES, TileFormat

__all__ = ["GROUPS", "INT4_FORMATS", "int4_format", "unpack_nibbles"]

GROUPS = (32, 64, 128)
MIDDLE = 8
HALF_RANGE = 7.5  # codes from -8 to 7 around the middle
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word of eight codes: the place of each, a pair's in both halves
TOP_NIBBLE = 0xF0000000 - (1 << 32)
LOW, TWICE = 0x0000FFFF, 0x00010001
CODES = 0x000F000F
HIGH_CODES = 0x00F000F0
HUNDRED_28 = 0x43004300  # twice, in bf16
ONES = 0x3F803F80
MINUS_136 = 0xC308C308  # less 128 and the zero point 8
QUARTERS, THIRTY_2 = 0x3E803E80, 0x42004200  # twice, in bf16
TWO_TO_127, TWO_TO_MINUS_122 = 0x7F007F00, 0x02800280
MINUS_34, MINUS_2 = 0xC208C208, 0xC000C000  # a quarter of 136 and of 8, less than zero
MINUS_ZEROS = 0x80008000


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] as numbers [..., 2 n] uint8, the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


class _Int4(DenseFormat):
    """Codes `int4` [..., N, K / 2] uint8 and `int4_scales` [..., N, K / group] float32; zero points always 8."""

    parts = MappingProxyType({"int4": 2, "int4_scales": 0})
    codes = "int4"
    share = 0.25
    panel = 4 * DenseFormat.panel  # its codes are moved eight at a time: packing them is a matter of launches
    scales = "int4_scales"
    zeros = False

    def __init__(self, group: int) -> None:
        self.block = group
        self.name = f"int4_{group}"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`; the same in any compute dtype."""
        self.check_columns(columns)
        groups = (rows, columns // self.block)
        return {"int4": ((rows, columns // 2), torch.uint8), "int4_scales": (groups, torch.float32)}

    @property
    def narrow(self) -> bool:
        """See `DenseFormat.narrow`."""
        return not self.zeros

    def tiles(self, *, wide: bool) -> TileFormat:
        """See `DenseFormat.tiles`."""
        return TileFormat(self.codes, 512, groups=max(1, 64 // self.block), wide=wide, zeros=self.zeros)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `MatrixFormat.shape`."""
        *outer, half = parts["int4"].shape
        return (*outer, 2 * half)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `MatrixFormat.dequantise`; (code - zero) times scale is rounded to float32 first."""
        codes, scales = unpack_nibbles(parts["int4"]).float(), parts["int4_scales"]
        *outer, columns = codes.shape
        check_part("int4_scales", scales, *outer, columns // self.block)
        groups = codes.reshape(*scales.shape, self.block)
        return ((groups - self._zeros(parts)) * scales[..., None]).reshape(codes.shape).to(dtype)

    def _zeros(self, _parts: Parts) -> torch.Tensor:
        return torch.tensor(float(MIDDLE))

    def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `DenseFormat.quantise`: ties go to even; a group's largest magnitude is 7.5 scales, which are bfloat16.

        Raises ShapeError for a K that is no multiple of the group.
        """
        if self.zeros:
            return super().quantise(weight)
        self.check_columns(weight.shape[-1])
        values = weight.float().unflatten(-1, (-1, self.block))
        largest = values.abs().amax(-1)
        if not bool(largest.isfinite().all()):
            raise ConfigError("INT4 cannot hold numbers that are not finite")
        scales = torch.where(largest > 0, largest / HALF_RANGE, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
        scales = scales.bfloat16().float()
        codes = ((values / scales[..., None]).round_().clamp_(-MIDDLE, MIDDLE - 1) + MIDDLE).to(torch.uint8).flatten(-2)
        return {"int4": codes[..., 0::2] | (codes[..., 1::2] << 4), "int4_scales": scales.bfloat16()}

    def pack_panel(self, parts: Parts, tiles: TileFormat, steps: torch.Tensor, row_scales: torch.Tensor) -> None:
        """See `DenseFormat.pack_panel`: words of eight codes, a pair's in the same place of both halves."""
        left, right, top, bottom = padding_of(self.shape(parts), steps)
        padding = (left, right // 2, top, bottom)
        codes = torch.nn.functional.pad(parts["int4"], padding, value=MIDDLE | MIDDLE << 4)
        plain = four_bit_lanes(codes, steps).contiguous().view(torch.int32)
        made = torch.zeros_like(plain)
        for column, place in enumerate(NIBBLES):
            moved = plain << (4 * (place - column)) if place >= column else plain >> (4 * (column - place))
            made |= moved & (0xF << (4 * place) if place < 7 else TOP_NIBBLE)
        steps[:, :, : tiles.code_bytes] = made.view(torch.uint8).reshape(*steps.shape[:2], tiles.code_bytes)
        words = [group_words(parts["int4_scales"], tiles, self.block, steps)]
        if tiles.zeros:
            words.append(row_pair(-(spread(parts["int4_zeros"], tiles, self.block, steps, MIDDLE) + 128)))
        put_after(steps, tiles, torch.cat(words, -2).contiguous())

    def unpack_panel(self, steps: torch.Tensor, tiles: TileFormat) -> torch.Tensor:
        """See `DenseFormat.unpack_panel`: 128 and each code, less 128 and the zero point, exact in bf16."""
        height, width, _ = steps.shape
        words = steps[:, :, : tiles.code_bytes].contiguous().view(torch.int32)
        pairs = [((words >> (4 * place)) & 0x000F000F) | 0x43004300 for place in range(4)]
        numbers = four_bit_rows(torch.stack(pairs, -1).view(torch.bfloat16).flatten(-2), steps)
        numbers = numbers.reshape(height, 2, 8, width, tiles.groups, -1)
        scales, zeros = group_scales(steps, tiles)
        numbers += -(128 + MIDDLE) if zeros is None else zeros.bfloat16()
        return (numbers * scales).to(torch.bfloat16).reshape(height * TILE_ROWS, -1)

    def fragment(self, tiles: TileFormat) -> Fragment:
        """See `CodedFormat.fragment`."""
        return _fragment(tiles)


class _Int4Zeros(_Int4):
    """The same with `int4_zeros` [..., N, K / group] uint8, the code that means zero in a group."""

    parts = MappingProxyType({"int4": 2, "int4_scales": 0, "int4_zeros": 0})
    zeros = True

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.name = f"int4_{group}_zeros"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`."""
        return super().specs(rows, columns, dtype) | {"int4_zeros": ((rows, columns // self.block), torch.uint8)}

    def _zeros(self, parts: Parts) -> torch.Tensor:
        check_part("int4_zeros", parts["int4_zeros"], *parts["int4_scales"].shape)
        return parts["int4_zeros"].float()[..., None]


INT4_FORMATS = tuple(kind(group) for group in GROUPS for kind in (_Int4, _Int4Zeros))


def int4_format(group: int, *, has_zeros: bool) -> DenseFormat:
    """The format of groups of 32, 64 or 128. Raises ShapeError for others."""
    if group not in GROUPS:
        raise ShapeError(f"INT4 has groups of {', '.join(map(str, GROUPS))} numbers, got {group}")
    return INT4_FORMATS[2 * GROUPS.index(group) + has_zeros]


def _fragment(tiles: TileFormat) -> Fragment:
    """How words of eight codes become pairs of bf16 in registers, their zero point taken off."""
    from lowlat.kernels.formats.fragment import make_group_scales, make_times
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    last, has_zeros, words_of_group = tiles.groups - 1, tiles.zeros, tiles.scale_words + tiles.zeros
    zeros_at = tiles.scale_words * WORD_BYTES

    @device_function
    def expand(word: Any, minus: Any) -> Any:
        """The four pairs of bf16 of a word of eight codes; minus: twice 128 and the zero point, less than zero."""
        codes, bits = uint32(CODES), uint32(HUNDRED_28)
        a, b = ptx.and_or(word, codes, bits), ptx.and_or(uint32(word >> uint32(4)), codes, bits)
        c, d = ptx.and_or(uint32(word >> uint32(8)), codes, bits), ptx.and_or(uint32(word >> uint32(12)), codes, bits)
        one = uint32(ONES)
        return (
            ptx.fma_bf16_pair(a, one, minus),
            ptx.fma_bf16_pair(b, one, minus),
            ptx.fma_bf16_pair(c, one, minus),
            ptx.fma_bf16_pair(d, one, minus),
        )

    @device_function
    def expand_quarters(word: Any, minus: Any, minus_high: Any) -> Any:
        """The numbers of `expand` divided by four, with one shift in place of three.

        minus       twice a quarter of 128 and the zero point, less than zero
        minus_high  twice a quarter of the zero point, less than zero

        A code in bits 4 to 7 of a bf16 is its value times 2**-129, since numbers of the lowest exponent go on where
        subnormal ones end, and in the lowest bits of 2**-122 it is that and as much; 2**127, the largest power, brings
        the one to a quarter of its size, the other to 32 and a quarter.
        """
        codes, high, bits = uint32(CODES), uint32(HIGH_CODES), uint32(TWO_TO_MINUS_122)
        power, later = uint32(TWO_TO_127), uint32(word >> uint32(8))
        return (
            ptx.fma_bf16_pair(ptx.and_or(word, codes, bits), power, minus),
            ptx.fma_bf16_pair(word & high, power, minus_high),
            ptx.fma_bf16_pair(ptx.and_or(later, codes, bits), power, minus),
            ptx.fma_bf16_pair(later & high, power, minus_high),
        )

    @device_function
    def load_group(weights: Any, half: Any, minus: Any, low_minus: Any) -> Any:
        """A quarter of a lane's numbers of half a step: four words of a row, and four of the row 8 below.

        minus, low_minus  of either row, as `take_zeros` gives them
        """
        w0, w1, v0, v1 = ptx.load_shared_128(weights)
        if half == 0:
            a0, a1, a2, a3 = expand_quarters(w0, minus[0], minus[1])
            b0, b1, b2, b3 = expand_quarters(v0, low_minus[0], low_minus[1])
        else:
            a0, a1, a2, a3 = expand_quarters(w1, minus[0], minus[1])
            b0, b1, b2, b3 = expand_quarters(v1, low_minus[0], low_minus[1])
        return a0, a1, a2, a3, b0, b1, b2, b3

    @device_function
    def take_zeros(words: Any) -> Any:
        """A quarter of 128 and the zero point and one of the zero point, less than zero, of either row."""
        minus = low_minus = uint32(MINUS_34), uint32(MINUS_2)
        if has_zeros:
            both, quarter = ptx.load_shared_u32(uint32(words + uint32(zeros_at))), uint32(QUARTERS)
            full = ptx.fma_bf16_pair(both, quarter, uint32(MINUS_ZEROS))
            own = ptx.fma_bf16_pair(both, quarter, uint32(THIRTY_2))
            minus = ptx.both_low(full), ptx.both_low(own)
            low_minus = ptx.both_high(full), ptx.both_high(own)
        return minus, low_minus

    def make_halves(four: Any, one: Any) -> tuple[Any, Any, Any]:
        times, scales = make_times(tiles), make_group_scales(tiles, one)
        first_zeros, group_bytes = tiles.code_bytes + zeros_at, WORD_BYTES * (1 + tiles.scale_words)

        @device_function
        def zeros(step: Any, row: Any, group: Any) -> Any:
            """Twice 128 and the zero point, less than zero, of both rows."""
            if not has_zeros:
                return uint32(MINUS_136), uint32(MINUS_136)
            both = one(step, uint32(uint32(first_zeros + group_bytes * group) + row))
            return uint32((both & uint32(LOW)) * uint32(TWICE)), uint32(uint32(both >> uint32(16)) * uint32(TWICE))

        @device_function
        def hold(step: Any, lane: Any) -> Any:
            codes = four(step, uint32(lane * uint32(16)))
            row = uint32(uint32(lane >> uint32(2)) * uint32(4))
            factors, minus = scales(step, row, 0), zeros(step, row, 0)
            if last == 1:
                return codes, factors, minus, scales(step, row, 1), zeros(step, row, 1)
            return codes, factors, minus, factors, minus

        @device_function
        def half(top: Any, low: Any, factors: Any, minus: Any) -> Any:
            return times(expand(top, minus[0]), factors[0]) + times(expand(low, minus[1]), factors[1])

        @device_function
        def first_half(held: Any) -> Any:
            return half(held[0][0], held[0][2], held[1], held[2])

        @device_function
        def second_half(held: Any) -> Any:
            return half(held[0][1], held[0][3], held[3], held[4])

        return hold, first_half, second_half

    @device_function
    def load_codes(words: Any) -> Any:
        a, b, c, d = ptx.load_shared_128(words)
        return a, b, c, d, a, b, c, d

    def make_expand(half: int) -> Any:
        own, below = half, 2 + half

        @device_function
        def expand_nibbles(raw: Any, minus: Any, low_minus: Any) -> Any:
            return expand(raw[own], minus), expand(raw[below], low_minus)

        return expand_nibbles

    def make_beside(group: int) -> Any:
        at = group * words_of_group * WORD_BYTES + zeros_at

        @device_function
        def beside(scales: Any) -> Any:
            """Zero points, twice in a word."""
            top, low = uint32(MINUS_136), uint32(MINUS_136)
            if has_zeros:
                both = ptx.load_shared_u32(uint32(scales + uint32(at)))
                top, low = uint32((both & uint32(LOW)) * uint32(TWICE)), uint32((both >> uint32(16)) * uint32(TWICE))
            return top, low

        return beside

    return Fragment(
        halves=make_halves, load_group=load_group, take_zeros=take_zeros, load_codes=load_codes, expand=make_expand,
        beside=make_beside,
    )  # fmt: skip
