"""Operands that a decode GEMM may have next to its rows and its weight."""

from dataclasses import dataclass

import torch

__all__ = ["BlockRow", "NormPrologue", "PartialArgmax", "Rotation"]


@dataclass(frozen=True)
class Rotation:
    """The rotation of a GEMM's queries and keys, and the write of keys and values to the cache.

    positions            [M]              int32, below C
    cos, sin             [C, D / 2]       float32
    row_live             [M]              uint8: dead rows write no keys and values
    k_cache, v_cache     [P, G, block, D] bf16, or with kv_scales uint8; updated; None: queries alone
    kv_scales            [2, G]           float32: keys and values are stored as codes; None: as they are
    block_table, slots, write_lens, offsets  as `kv_write` of the reference has them
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    row_live: torch.Tensor | None = None
    k_cache: torch.Tensor | None = None
    v_cache: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    write_lens: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class NormPrologue:
    """The norm of a GEMM's rows, which every block makes for itself; bit for bit what `rms_norm` gives.

    weight    [K]        bf16
    row_live  [M]        uint8; None: all rows are live; dead ones become zeros
    out       [M, K]     bf16, out: the normed rows, for other readers; None: nobody else reads them
    """

    weight: torch.Tensor
    eps: float
    row_live: torch.Tensor | None = None
    out: torch.Tensor | None = None


@dataclass(frozen=True)
class PartialArgmax:
    """The partial argmax: the best pair of each row among the columns of each block, as `select` has pairs.

    pairs  [M, B, 2]  int32, out: uint32 in truth; B at least the blocks of a grid; a place without a number is (0, 0)
    limit  bits of the largest magnitude that leaves a row whole: `select.FINITE` or `select.INFINITY`
    """

    pairs: torch.Tensor
    limit: int


@dataclass(frozen=True)
class BlockRow:
    """A row of each slot's block that is added to each of the slot's rows, bit for bit as `bias_rows` does it.

    block  [B * R, N]  float32
    wide   rows of a slot: x has B times as many
    row    of the R, which one
    """

    block: torch.Tensor
    wide: int
    row: int
