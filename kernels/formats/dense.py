"""Quantised dense matrices packed for decode's GEMMs, and unpacked to bf16 panels for prefill.

A lane of a warp has, of a step of 64 columns, 8 consecutive columns of either half of a row, and of the row 8 below;
its codes lie together, their bits where fragments take them from. `gemm.tiles` has the layout of a step.
"""

from collections.abc import Mapping

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats.base import MatrixFormat, Parts, tiles_of
from lowlat.kernels.formats.fp8 import FP8, FP8_BLOCK, decode_e4m3
from lowlat.kernels.formats.int4 import INT4_FORMATS, MIDDLE, unpack_nibbles
from lowlat.kernels.formats.mxfp4 import pack_codes, unpack_codes
from lowlat.kernels.formats.nvfp4 import FACTOR, LEAST_SCALE, NVFP4, SCALE_BITS, SCALE_STEP
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS, PackedMatrix
from lowlat.kernels.gemm.tiles import FP8_TILES, NVFP4_TILES, TileFormat

__all__ = ["DENSE_FORMATS", "PANEL_BYTES", "pack_matrix", "tile_format_of", "unpack_matrix"]

DENSE_FORMATS: Mapping[str, MatrixFormat] = {each.name: each for each in (FP8, FP8_BLOCK, *INT4_FORMATS, NVFP4)}
PANEL = 4 << 20  # numbers that are packed or unpacked at once
INT4_PANEL = 4 * PANEL  # of INT4, whose codes are moved eight at a time: packing them is a matter of launches
PANEL_BYTES = 24 * PANEL  # that packing them takes, at most
# Of each e4m3 code of a word: bits, and how far they lie to the left of the lowest byte's.
MOVES = (
    ((0x80, 8), (0x7F, 4)),
    ((0x80, 24), (0x7F, 20)),
    ((0x80, 4), (0x70, 8), (0x0F, 0)),
    ((0x80, 20), (0x70, 24), (0x0F, 16)),
)
FIRST, SECOND_LEFT, SECOND_RIGHT = 0x87F087F0 - (1 << 32), 0x80F080F0 - (1 << 32), 0x07000700
TOP_NIBBLE = 0xF0000000 - (1 << 32)
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word of eight codes: the place of each


def pack_matrix(
    weight_format: MatrixFormat, parts: Parts, order: torch.Tensor | None = None, tiles: TileFormat | None = None
) -> PackedMatrix:
    """Pack a matrix [N, K] of one of DENSE_FORMATS, its rows taken in `order` first. Raises ConfigError for others.

    tiles  the layout of its steps; None: `tile_format_of`'s
    """
    if weight_format.name not in DENSE_FORMATS:
        raise ConfigError(f"the kernels read bf16, {', '.join(DENSE_FORMATS)}, and a matrix is in {weight_format.name}")
    (rows, columns), device = weight_format.shape(parts), next(iter(parts.values())).device
    height, width = tiles_of(rows, columns)
    tiles = tiles or tile_format_of(weight_format, parts)
    held = torch.empty(height * (width * tiles.step_bytes + 64 * tiles.row_scales), dtype=torch.uint8, device=device)
    steps = held[: height * width * tiles.step_bytes].view(height, width, tiles.step_bytes)
    scales = held[steps.numel() :].view(torch.float32).fill_(1)
    numbers = INT4_PANEL if "int4" in parts else PANEL
    count = max(1, numbers // (width * TILE_COLUMNS * TILE_ROWS))
    for first in range(0, 0 if held.is_meta else height, count):  # what has no memory has nothing to pack
        some = slice(first * TILE_ROWS, min((first + count) * TILE_ROWS, rows))
        places = some if order is None else order[some].to(device)
        own = {name: part[places] for name, part in parts.items()}
        _pack_panel(weight_format, own, tiles, steps[first : first + count], scales[some])
    return PackedMatrix(steps, rows, columns, order, held, tiles)


def _pack_panel(
    weight_format: MatrixFormat, parts: Parts, tiles: TileFormat, steps: torch.Tensor, row_scales: torch.Tensor
) -> None:
    """Pack some rows of a matrix: steps [ceil(n / 16), ceil(K / 64), bytes] uint8 and row_scales [n] float32, out."""
    (rows, columns), (height, width, _) = weight_format.shape(parts), steps.shape
    padding = (0, width * TILE_COLUMNS - columns, 0, height * TILE_ROWS - rows)
    is_fp8, is_int4 = "fp8" in parts, "int4" in parts
    if is_int4:
        halves = (0, padding[1] // 2, 0, padding[3])
        codes = torch.nn.functional.pad(parts["int4"], halves, value=MIDDLE | MIDDLE << 4)
    else:
        codes = parts["fp8"] if is_fp8 else _with_signs(unpack_nibbles(parts["nvfp4"]), parts["nvfp4_scales"])
        codes = torch.nn.functional.pad(codes, padding)
    # tile, row half, row in its half, k step, column half, quad, the bytes of 8 columns
    lanes = codes.view(height, 2, 8, width, 2, 4, -1)
    if is_fp8:
        words = _fp8_words(lanes.permute(0, 3, 1, 2, 5, 4, 6))
    else:
        lanes = lanes.permute(0, 3, 2, 5, 1, 4, 6)
        words = _int4_words(lanes) if is_int4 else pack_codes(lanes[..., 0::2] | (lanes[..., 1::2] << 4))
    steps[:, :, : tiles.code_bytes] = words.view(torch.uint8).reshape(height, width, tiles.code_bytes)
    if tiles.row_scales:
        row_scales.copy_((parts["fp8_scales"] if is_fp8 else parts["nvfp4_factors"] * FACTOR).reshape(-1))
    if weight_format is NVFP4:
        scales = _packed_scales(parts["nvfp4_scales"])
        scales = torch.nn.functional.pad(scales, (0, width * 4 - columns // 16, 0, padding[3]))
        scales = scales.view(height, 2, 8, width, 4).permute(0, 3, 1, 2, 4)
        steps[:, :, tiles.code_bytes :] = scales.reshape(height, width, -1)
    elif tiles.groups:
        behind_codes = _group_words(tiles, weight_format, parts, height, width)
        steps[:, :, tiles.code_bytes :] = behind_codes.view(torch.uint8).reshape(height, width, -1)


def tile_format_of(weight_format: MatrixFormat, parts: Parts) -> TileFormat:
    """The layout of a matrix's steps: scales take 16 bits where bf16 holds all of them; without content by dtype."""
    if weight_format is FP8 or weight_format is NVFP4:
        return FP8_TILES if weight_format is FP8 else NVFP4_TILES
    scales = parts["fp8_scales" if weight_format is FP8_BLOCK else "int4_scales"]
    is_narrow = scales.dtype == torch.bfloat16 or (
        not scales.is_meta and torch.equal(scales.bfloat16().float(), scales)
    )
    wide = not is_narrow
    if weight_format is FP8_BLOCK:
        return TileFormat("fp8", 1024, groups=1, wide=wide)
    return TileFormat("int4", 512, groups=max(1, 64 // weight_format.block), wide=wide, zeros="int4_zeros" in parts)


def _fp8_words(codes: torch.Tensor) -> torch.Tensor:
    """Words of four codes each, their bits where `fp8_fragment` takes them from."""
    plain = codes.contiguous().view(torch.int32)
    made = torch.zeros_like(plain)
    for byte, moves in enumerate(MOVES):
        for mask, place in moves:
            made |= ((plain >> (8 * byte)) & mask) << place
    return made


def _int4_words(codes: torch.Tensor) -> torch.Tensor:
    """Words of eight codes each, of bytes [..., 4] of two, a pair's in the same place of both halves."""
    plain = codes.contiguous().view(torch.int32)
    made = torch.zeros_like(plain)
    for column, place in enumerate(NIBBLES):
        moved = plain << (4 * (place - column)) if place >= column else plain >> (4 * (column - place))
        made |= moved & (0xF << (4 * place) if place < 7 else TOP_NIBBLE)
    return made


def _with_signs(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """NVFP4's codes [N, K] with the signs of their blocks' scales; zeros where these are zeros."""
    blocks, scales = codes.unflatten(-1, (scales.shape[-1], -1)), scales[..., None]
    signed = blocks ^ ((scales & 128) >> 4)
    return torch.where((scales & 127) == 0, signed & 8, signed).flatten(-2)


def _packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Magnitudes of e4m3 scales with a bit more of exponent, as `nvfp4_fragment` takes them; uint8, as they were."""
    bits = decode_e4m3(scales & 127).bfloat16().view(torch.int16) >> 4
    return (bits - LEAST_SCALE).clamp_(0, 255).to(torch.uint8)


def _spread(
    values: torch.Tensor, tiles: TileFormat, group: int, height: int, width: int, beyond: float
) -> torch.Tensor:
    """Values [N, G] of groups of columns for each tile, step, group of a step, row half and row of it, float32."""
    rows, count = values.shape
    size = TILE_COLUMNS // tiles.groups
    places = torch.arange(width * tiles.groups, device=values.device) * size // group
    padded = torch.nn.functional.pad(values.float(), (0, 1, 0, height * TILE_ROWS - rows), value=beyond)
    return padded[:, places.clamp_max(count)].view(height, 2, 8, width, tiles.groups).permute(0, 3, 4, 1, 2)


def _pair(values: torch.Tensor) -> torch.Tensor:
    """Words of two bf16 numbers, of a row and of the row 8 below: [..., 2, 8] to [..., 1, 8] int32."""
    bits = values.bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    return (bits[..., :1, :] | (bits[..., 1:, :] << 16)).contiguous()


def _group_words(tiles: TileFormat, weight_format: MatrixFormat, parts: Parts, height: int, width: int) -> torch.Tensor:
    """The words after the codes of all steps, [tile, step, group, word, row] int32."""
    group = 128 if weight_format is FP8_BLOCK else weight_format.block
    scales = parts["fp8_scales" if weight_format is FP8_BLOCK else "int4_scales"]
    spread = _spread(scales, tiles, group, height, width, 1.0)
    words = [spread.contiguous().view(torch.int32) if tiles.wide else _pair(spread)]
    if tiles.zeros:
        words.append(_pair(-(_spread(parts["int4_zeros"], tiles, group, height, width, MIDDLE) + 128)))
    return torch.cat(words, -2).contiguous()


def unpack_matrix(packed: PackedMatrix) -> torch.Tensor:
    """The numbers [N, K] of a packed matrix in bf16, rows in the packed order.

    Those of FP8 by row and of NVFP4 come without the scales of their rows, exactly, NVFP4's as 2**-8 of what these make
    of them; others are rounded once. It takes memory for some millions of numbers besides.
    """
    height, width, _ = packed.tiles.shape
    out = torch.empty(height * TILE_ROWS, width * TILE_COLUMNS, dtype=torch.bfloat16, device=packed.tiles.device)
    count = max(1, PANEL // (width * TILE_COLUMNS * TILE_ROWS))
    for first in range(0, height, count):
        steps = packed.tiles[first : first + count]
        out[first * TILE_ROWS : (first + steps.shape[0]) * TILE_ROWS] = _panel(steps, packed.tile_format)
    return out[: packed.rows, : packed.columns]


def _panel(steps: torch.Tensor, tiles: TileFormat) -> torch.Tensor:
    """The numbers of some rows of tiles."""
    height, width, _ = steps.shape
    words, shape = steps[:, :, : tiles.code_bytes].contiguous().view(torch.int32), (height * TILE_ROWS, -1)
    if tiles.name == "fp8":  # tile, step, row half, row, quad, column half, 8 columns
        numbers = _fp8_numbers(words).view(height, width, 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6)
    else:  # tile, step, row, quad, row half, column half, 8 columns
        made = _int4_numbers(words) if tiles.name == "int4" else _nvfp4_numbers(words)
        numbers = made.view(height, width, 8, 4, 2, 2, 8).permute(0, 4, 2, 1, 5, 3, 6)
    if tiles.name == "nvfp4":
        scales = steps[:, :, tiles.code_bytes :].reshape(height, width, 2, 8, 4).permute(0, 2, 3, 1, 4)
        sizes = ((scales.to(torch.int16) * SCALE_STEP) + SCALE_BITS).view(torch.bfloat16) * 2.0**-126
        return (numbers.reshape(height, 2, 8, width, 4, 16) * sizes[..., None]).reshape(shape)
    if tiles.row_scales:
        return numbers.reshape(shape)
    behind = steps[:, :, tiles.code_bytes :].contiguous().view(torch.int32).view(height, width, tiles.groups, -1, 8)
    scales = behind[..., :2, :].view(torch.float32) if tiles.wide else _unpair(behind[..., :1, :])
    numbers = numbers.reshape(height, 2, 8, width, tiles.groups, -1)
    if tiles.name == "int4":  # exact in bf16: 128 and a code, less 128 and the zero point
        numbers += _by_row(_unpair(behind[..., tiles.scale_words :, :])).bfloat16() if tiles.zeros else -(128 + MIDDLE)
    return (numbers * _by_row(scales)).to(torch.bfloat16).reshape(shape)


def _fp8_numbers(words: torch.Tensor) -> torch.Tensor:
    """Four numbers of each word, as `fp8_fragment` makes them: [..., n] int32 to [..., 4 n] bf16."""
    second = ((words << 4) & SECOND_LEFT) | ((words >> 4) & SECOND_RIGHT)
    return torch.stack((words & FIRST, second), -1).view(torch.bfloat16).flatten(-2).mul_(2.0**120)


def _int4_numbers(words: torch.Tensor) -> torch.Tensor:
    """128 and each of the eight codes of each word, as `int4_fragment` makes them."""
    pairs = [((words >> (4 * place)) & 0x000F000F) | 0x43004300 for place in range(4)]
    return torch.stack(pairs, -1).view(torch.bfloat16).flatten(-2)


def _nvfp4_numbers(words: torch.Tensor) -> torch.Tensor:
    """The eight codes of each word as numbers, by their bits: a table would be copied to the device, which a capture
    forbids."""
    codes = unpack_nibbles(unpack_codes(words)).to(torch.int16)
    return ((codes & 7) << 6 | (codes & 8) * -4096).view(torch.bfloat16).mul_(2.0**126)


def _unpair(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pair`, float32."""
    return torch.cat(((words << 16).view(torch.float32), (words & -65536).view(torch.float32)), -2)


def _by_row(values: torch.Tensor) -> torch.Tensor:
    """Values by tile, step, group, row half and row where numbers stand: tile, row half, row, step, group, 1."""
    return values.permute(0, 3, 4, 1, 2)[..., None]
