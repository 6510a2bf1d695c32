"""Experts' matrices in the order in which the lanes of a warp read them, MXFP4 or bf16, and back.

A matrix [N, K] is cut into tiles of 16 rows by 64 columns as `packing` has them. Of MXFP4 a tile's codes are 512 bytes:
a lane's four words, each of the eight codes that it has in one row and one block, so placed in the word that masks,
shifts and one product of integers make pairs of bf16 of them. It knows no kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS, PackedMatrix, pack, unpack
from lowlat.kernels.reference.moe.mxfp4 import BLOCK, dequantise
from lowlat.kernels.reference.shapes import check_shape

__all__ = [
    "MAX_SCALE",
    "SCALE_OFFSET",
    "PackedExperts",
    "allocate_experts",
    "pack_codes",
    "pack_expert_into",
    "pack_experts",
    "unpack_codes",
    "unpack_expert",
]

# A scale is stored as the exponent that a block's sum wants, which comes times 2**-63: see `experts_multiply`. So the
# greatest is 191, for 2**64.
SCALE_OFFSET = 63
MIN_SCALE, MAX_SCALE, NEUTRAL_SCALE = 1, 254 - SCALE_OFFSET, 127
# A half-word holds four codes, the same places in both halves. Of each code: where its bits lie, from the lowest bit
# of its magnitude to its sign. The first three come to bits 6, 7, 8 and 15 by one shift to the left, the last one by
# a product with a number of three bits: see `experts_decode`.
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11))
MAGNITUDE = 7


@dataclass(frozen=True)
class PackedExperts:
    """The packed matrices of all experts of one product.

    words        [E, ceil(N / 16), ceil(K / 64), 128] int32: codes; or [.., 1024] bf16 without scales
    scales       [E, ceil(N / 16), ceil(K / 64), 32] uint8: of 8 rows two blocks, and of the rows 8 below;
                 a scale s is stored as s + SCALE_OFFSET; or None
    num_experts  E
    rows         N, before padding
    columns      K, before padding
    order        [N] int64 or None: row i of a packed matrix is row order[i] of the original
    """

    words: torch.Tensor
    scales: torch.Tensor | None
    num_experts: int
    rows: int
    columns: int
    order: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts."""
        scales = 0 if self.scales is None else self.scales.numel()
        return self.words.numel() * self.words.element_size() + scales


def allocate_experts(
    *,
    num_experts: int,
    rows: int,
    columns: int,
    quantised: bool,
    order: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> PackedExperts:
    """Room for E matrices [N, K], MXFP4 if `quantised`, else bf16; every expert must be packed into it.

    order   [N] int64 or None, as `pack` of `packing` takes it
    Raises ShapeError for MXFP4 whose K is no multiple of 32, or another order.
    """
    if quantised and columns % BLOCK:
        raise ShapeError(f"MXFP4 needs rows of a multiple of {BLOCK} numbers, got {columns}")
    if order is not None:
        check_shape("order", order, rows)
    tiles = (num_experts, -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS))
    if not quantised:
        words = torch.empty(*tiles, 1024, dtype=torch.bfloat16, device=device)
        return PackedExperts(words, None, num_experts, rows, columns, order)
    words = torch.empty(*tiles, 128, dtype=torch.int32, device=device)
    scales = torch.empty(*tiles, 32, dtype=torch.uint8, device=device)
    return PackedExperts(words, scales, num_experts, rows, columns, order)


def pack_expert_into(
    packed: PackedExperts,
    index: int,
    *,
    weight: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Pack one expert's matrix to its place.

    index   of the expert
    weight  [N, K]           bf16, or
    blocks  [N, K / 32, 16]  uint8  two codes a byte, the earlier in the low nibble, and
    scales  [N, K / 32]      uint8  1 to 191; another one only where all 32 numbers are zero
    Raises ShapeError for what does not fit, ConfigError for other scales.
    """
    if not 0 <= index < packed.num_experts:
        raise ShapeError(f"expert {index} of {packed.num_experts} experts")
    if packed.scales is None:
        if weight is None or blocks is not None or scales is not None:
            raise ShapeError("experts in bf16 are packed from weight alone")
        check_shape("weight", weight, packed.rows, packed.columns)
        packed.words[index].copy_(pack(weight.to(packed.words.device, torch.bfloat16), packed.order).tiles)
        return
    if blocks is None or scales is None or weight is not None:
        raise ShapeError("experts in MXFP4 are packed from blocks and scales alone")
    check_shape("blocks", blocks, packed.rows, packed.columns // BLOCK, BLOCK // 2)
    check_shape("scales", scales, packed.rows, packed.columns // BLOCK)
    blocks, scales = blocks.to(packed.words.device), scales.to(packed.words.device)
    if packed.order is not None:
        order = packed.order.to(packed.words.device)
        blocks, scales = blocks[order], scales[order]
    scales = _checked_scales(blocks, scales, index) + SCALE_OFFSET
    extra_rows, extra_blocks = -packed.rows % TILE_ROWS, packed.columns // BLOCK % 2
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, extra_blocks, 0, extra_rows))
    scales = torch.nn.functional.pad(scales, (0, extra_blocks, 0, extra_rows), value=NEUTRAL_SCALE + SCALE_OFFSET)
    height, width = packed.words.shape[1:3]
    # tile, row half, group, step, block, quad, 4 bytes -> tile, step, group, quad, row half, block
    lanes = blocks.reshape(height, 2, 8, width, 2, 4, 4).permute(0, 3, 2, 5, 1, 4, 6)
    packed.words[index].copy_(pack_codes(lanes).reshape(height, width, 128))
    # tile, row half, group, step, block -> tile, step, group, row half, block
    packed.scales[index].copy_(scales.reshape(height, 2, 8, width, 2).permute(0, 3, 2, 1, 4).reshape(height, width, 32))


def pack_experts(
    *,
    weight: torch.Tensor | Sequence[torch.Tensor] | None = None,
    blocks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> PackedExperts:
    """Pack the matrices of all experts, their rows taken in `order` first.

    weight  [E, N, K]            bf16, or
    blocks  [E, N, K / 32, 16]   uint8, and
    scales  [E, N, K / 32]       uint8, as `pack_expert_into` takes them
    order   [N]                  int64
    Raises as `allocate_experts` and `pack_expert_into` do.
    """
    if weight is not None:
        if blocks is not None or scales is not None:
            raise ShapeError("experts are packed from weight, or from blocks and scales, not from both")
        rows, columns = weight[0].shape
        packed = allocate_experts(
            num_experts=len(weight), rows=rows, columns=columns, quantised=False, order=order, device=weight[0].device
        )
        for index, matrix in enumerate(weight):
            pack_expert_into(packed, index, weight=matrix)
        return packed
    if blocks is None or scales is None:
        raise ShapeError("experts need either weight or both blocks and scales")
    count, rows, width = scales.shape
    check_shape("blocks", blocks, count, rows, width, BLOCK // 2)
    packed = allocate_experts(
        num_experts=count, rows=rows, columns=width * BLOCK, quantised=True, order=order, device=blocks.device
    )
    for index in range(count):
        pack_expert_into(packed, index, blocks=blocks[index], scales=scales[index])
    return packed


def unpack_expert(packed: PackedExperts, expert: int) -> torch.Tensor:
    """One expert's matrix [N, K] bf16, exactly, its rows in their original order."""
    if packed.scales is None:
        return unpack(PackedMatrix(packed.words[expert], packed.rows, packed.columns, packed.order))
    height, width = packed.words.shape[1:3]
    lanes = unpack_codes(packed.words[expert].reshape(height, width, 8, 4, 2, 2))
    blocks = lanes.permute(0, 4, 2, 1, 5, 3, 6).reshape(height * TILE_ROWS, width * 2, BLOCK // 2)
    scales = packed.scales[expert].reshape(height, width, 8, 2, 2).permute(0, 3, 2, 1, 4)
    scales = scales.reshape(height * TILE_ROWS, width * 2) - SCALE_OFFSET
    matrix = dequantise(blocks, scales, torch.bfloat16)[: packed.rows, : packed.columns]
    if packed.order is None:
        return matrix.contiguous()
    restored = torch.empty(packed.rows, packed.columns, dtype=matrix.dtype, device=matrix.device)
    restored[packed.order.to(matrix.device)] = matrix
    return restored


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


def _checked_scales(blocks: torch.Tensor, scales: torch.Tensor, index: int) -> torch.Tensor:
    """The scales, those of blocks of zeros made neutral where they are out of range."""
    strange = (scales < MIN_SCALE) | (scales > MAX_SCALE)
    if not bool(strange.any()):
        return scales
    used = strange & ((blocks & (MAGNITUDE | MAGNITUDE << 4)) != 0).any(-1)
    if bool(used.any()):
        raise ConfigError(
            f"expert {index}: scale {int(scales[used][0])} of an MXFP4 block; kernels take {MIN_SCALE} to {MAX_SCALE}, "
            "as one product in float32 applies them"
        )
    return torch.where(strange, NEUTRAL_SCALE, scales).to(torch.uint8)
