"""This module packs experts' matrices in the order in which a warp's lanes read them, and unpacks them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.common.activation import SILU
from lowlat.kernels.formats import FORMATS, WeightFormat, tiles_of
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.moe.formats import experts_format
from lowlat.kernels.moe.plan import GATE_UP, ExpertShape
from lowlat.kernels.reference.shapes import check_shape

__all__ = [
    "PackedExperts", "allocate_experts", "bytes_an_expert", "check_expert_bias", "pack_expert_into", "pack_experts",
    "shape_of", "unpack_expert",
]  # fmt: skip


TOGETHER = 1 << 26  # numbers that are packed at once


@dataclass(frozen=True)
class PackedExperts:
    """The packed matrices of all experts of one GEMM.

    format       of the words and scales
    words        [E, ceil(N / 16), ceil(K / 64), format.tile_words]   format.word_dtype
    scales       [E, ceil(N / 16), ceil(K / 64), format.scale_bytes]  uint8; None for a format without
    row_scales   [E, ceil(N / 16) * 16]  float32, of packed rows; None for a format without
    num_experts  E
    rows         N, before padding
    columns      K, before padding
    order        [N] int64 or None: row i of a packed matrix is row order[i] of the original
    """

    format: WeightFormat
    words: torch.Tensor
    scales: torch.Tensor | None
    num_experts: int
    rows: int
    columns: int
    order: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Words and scales."""
        return [each for each in (self.words, self.scales, self.row_scales) if each is not None]

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor | int]:
        """Words, scales and scales of rows as kernels take them: 0 where there are none."""
        return self.words, 0 if self.scales is None else self.scales, 0 if self.row_scales is None else self.row_scales

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts."""
        return self.num_experts * self.format.packed_bytes(self.rows, self.columns)

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> "PackedExperts":
        """The same experts with their memory where `place` puts a tensor's content."""
        scales, row_scales = (None if each is None else place(each) for each in (self.scales, self.row_scales))
        return replace(self, words=place(self.words), scales=scales, row_scales=row_scales)


def allocate_experts(
    weight_format: WeightFormat,
    *,
    num_experts: int,
    rows: int,
    columns: int,
    order: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> PackedExperts:
    """Memory for E matrices [N, K]; every expert must be packed into it.

    order   [N] int64 or None, as `gemm.packing.pack` takes it
    Raises ShapeError for a K that the format cannot hold, or another order.
    """
    weight_format.check_columns(columns)
    if order is not None and order.shape != (rows,):
        raise ShapeError(f"order must have shape [{rows}], got {list(order.shape)}")
    tiles, scales = (num_experts, *tiles_of(rows, columns)), None
    words = torch.empty(*tiles, weight_format.tile_words, dtype=weight_format.word_dtype, device=device)
    if weight_format.has_scales:
        scales = torch.empty(*tiles, weight_format.scale_bytes, dtype=torch.uint8, device=device)
    row_scales = None
    if weight_format.row_scales:
        row_scales = torch.empty(num_experts, tiles[1] * TILE_ROWS, device=device)
    return PackedExperts(weight_format, words, scales, num_experts, rows, columns, order, row_scales)


def shape_of(
    kind: str,
    experts: PackedExperts,
    top_k: int,
    *,
    biased: bool,
    clamped: bool = True,
    parts: KParts | None = None,
    activation: str = SILU,
) -> ExpertShape:
    """The shape of a GEMM of experts, of which a row chooses so many; the others as `ExpertShape` has them.

    Raises ShapeError for gates that are clamped and have another activation than SiLU.
    """
    if kind == GATE_UP and clamped and activation != SILU:
        raise ShapeError(f"gates that are clamped have {SILU}, not {activation}")
    return ExpertShape(
        kind, experts.rows, experts.columns, top_k, experts.format, biased, clamped, parts, activation=activation
    )


def check_expert_bias(bias: torch.Tensor | None, experts: PackedExperts, name: str = "bias") -> None:
    """Raise ShapeError unless a bias is [E, N] bf16, or None."""
    if bias is not None:
        check_shape(name, bias, experts.num_experts, experts.rows)
        if bias.dtype != torch.bfloat16:
            raise ShapeError(f"{name} must be torch.bfloat16, got {bias.dtype}")


def pack_expert_into(packed: PackedExperts, index: int, **parts: torch.Tensor) -> None:
    """Pack one expert's matrix [N, K], given by the parts of its format, to its place.

    Raises ShapeError for what does not fit, ConfigError for values that kernels do not decode exactly.
    """
    if not 0 <= index < packed.num_experts:
        raise ShapeError(f"expert {index} of {packed.num_experts} experts")
    packed.format.check_parts(parts)
    scales, row_scales = (None if each is None else each[index] for each in (packed.scales, packed.row_scales))
    shape = (packed.rows, packed.columns)
    try:
        packed.format.pack_into(parts, shape, packed.order, packed.words[index], scales, row_scales)
    except ConfigError as error:
        raise type(error)(f"expert {index}: {error}") from error


def pack_experts(
    parts: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    *,
    order: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> PackedExperts:
    """Pack the matrices [E, N, K] of all experts, given by the parts of their format, rows taken in `order` first.

    order   [N] int64
    device  where the packed matrices are; None: where the parts are
    A few experts are packed after the others: on another device there is never a second copy of all of them. Raises
    as `allocate_experts` and `pack_expert_into` do.
    """
    weight_format = experts_format(parts)
    firsts = {name: part[0] for name, part in parts.items()}
    rows, columns = weight_format.shape(firsts)
    count = len(next(iter(parts.values())))
    for name, part in parts.items():
        if len(part) != count:
            raise ShapeError(f"{name} must have shape [{count}, ...], got {len(part)} matrices")
    packed = allocate_experts(
        weight_format,
        num_experts=count,
        rows=rows,
        columns=columns,
        order=order,
        device=next(iter(firsts.values())).device if device is None else device,
    )
    together = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    if weight_format.name in FORMATS or rows % TILE_ROWS or len(together) < len(parts):
        for index in range(count):
            pack_expert_into(packed, index, **{name: part[index] for name, part in parts.items()})
        return packed
    step = max(1, TOGETHER // (rows * columns))
    for first in range(0, count, step):
        _pack_together(packed, first, {name: part[first : first + step] for name, part in together.items()})
    return packed


def _pack_together(packed: PackedExperts, first: int, parts: Mapping[str, torch.Tensor]) -> None:
    """Pack some experts as one tall matrix: their tiles lie after each other."""
    count, order = len(next(iter(parts.values()))), packed.order
    if order is not None:
        device = next(iter(parts.values())).device  # a panel's rows are then taken without a wait for the host
        order = (packed.rows * torch.arange(count, device=device)[:, None] + order.to(device)).flatten()
    places = slice(first, first + count)
    scales, row_scales = (
        None if each is None else each[places].flatten(0, 1) for each in (packed.scales, packed.row_scales)
    )
    tall = {name: part.flatten(0, 1) for name, part in parts.items()}
    shape = (count * packed.rows, packed.columns)
    packed.format.pack_into(tall, shape, order, packed.words[places].flatten(0, 1), scales, row_scales)


def bytes_an_expert(arguments: Iterable[object]) -> int:
    """Bytes of one expert's packed words and scales among a call's arguments, which alone have four dimensions."""
    tensors = (each for each in arguments if isinstance(each, torch.Tensor) and each.dim() == 4)
    return sum(tensor.nbytes // tensor.shape[0] for tensor in tensors)


def unpack_expert(packed: PackedExperts, expert: int) -> torch.Tensor:
    """One expert's matrix [N, K] bf16, rounded where its scales want it, its rows in their original order."""
    scales, row_scales = (None if each is None else each[expert] for each in (packed.scales, packed.row_scales))
    matrix = packed.format.unpack((packed.rows, packed.columns), packed.words[expert], scales, row_scales)
    if packed.order is None:
        return matrix.contiguous()
    restored = torch.empty(packed.rows, packed.columns, dtype=matrix.dtype, device=matrix.device)
    restored[packed.order.to(matrix.device)] = matrix
    return restored
