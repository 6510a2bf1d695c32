"""A mixture of experts: router, clamped SwiGLU, weighted sum. Source: gpt-oss model card and checkpoints.

Each distinct expert is dequantised once a call; each row's product is a block of its own, so its bits do not depend
on who else chose the expert; partial results are added in order of rank.
"""

import torch

from lowlat.kernels.reference.linear import linear_block
from lowlat.kernels.reference.mxfp4 import dequantise

__all__ = ["experts_down", "experts_gate_up", "router"]


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> None:
    """Choose each row's experts; softmax over the chosen.

    x               [M, N]  compute dtype
    weight, bias    [E, N], [E]
    row_live        [M]     uint8; None: all
    expert_ids      [M, K]  int32    out: by descending logit, ties to the lowest id; -1 where dead
    expert_weights  [M, K]  float32  out: zero where dead
    """
    chosen = expert_ids.shape[1]
    expert_ids.fill_(-1)
    expert_weights.zero_()
    live = [True] * x.shape[0] if row_live is None else [bool(flag) for flag in row_live.reshape(-1).tolist()]
    for row, alive in enumerate(live):
        if alive:
            logits = linear_block(x[row : row + 1], weight)[0] + bias.float()
            best, ids = torch.sort(logits, descending=True, stable=True)
            expert_ids[row] = ids[:chosen]
            expert_weights[row] = torch.softmax(best[:chosen], -1)


def experts_gate_up(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    bias: torch.Tensor,
    weight: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    limit: float,
    alpha: float,
) -> None:
    """Gate and up products of the chosen experts, clamped SwiGLU.

    x               [M, N]             compute dtype
    expert_ids      [M, K]             int32; -1 where dead
    weight          [E, 2I, N]         or blocks [E, 2I, N / 32, 16] and scales [E, 2I, N / 32] uint8; gates first
    bias            [E, 2I]
    out             [M, K, I]          out, compute dtype
    (up + 1) * gate * sigmoid(alpha * gate), gate at most limit, up within +-limit.
    """
    out.zero_()
    inner = out.shape[-1]
    for expert, places in _by_expert(expert_ids):
        matrix = _matrix(expert, weight, blocks, scales)
        for row, rank in places:
            product = linear_block(x[row : row + 1], matrix)[0] + bias[expert].float()
            gate, up = product[:inner].clamp(max=limit), product[inner:].clamp(-limit, limit)
            out[row, rank] = (up + 1) * gate * torch.sigmoid(alpha * gate)


def experts_down(
    activated: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    bias: torch.Tensor,
    weight: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> None:
    """Down products of the chosen experts, weighted and added in order of rank.

    activated       [M, K, I]  compute dtype
    expert_ids      [M, K]     int32; -1 where dead
    expert_weights  [M, K]     float32
    weight          [E, N, I]  or blocks and scales
    bias            [E, N]
    out             [M, N]     float32, out; zero where dead
    """
    rows, chosen = expert_ids.shape
    partial = out.new_zeros(rows, chosen, out.shape[1])
    for expert, places in _by_expert(expert_ids):
        matrix = _matrix(expert, weight, blocks, scales)
        for row, rank in places:
            product = linear_block(activated[row, rank][None], matrix)[0] + bias[expert].float()
            partial[row, rank] = product * expert_weights[row, rank]
    out.zero_()
    for rank in range(chosen):
        out += partial[:, rank]


def _by_expert(expert_ids: torch.Tensor) -> list[tuple[int, list[tuple[int, int]]]]:
    places: dict[int, list[tuple[int, int]]] = {}
    for row, ids in enumerate(expert_ids.tolist()):
        for rank, expert in enumerate(ids):
            if expert >= 0:
                places.setdefault(expert, []).append((row, rank))
    return sorted(places.items())


def _matrix(
    expert: int, weight: torch.Tensor | None, blocks: torch.Tensor | None, scales: torch.Tensor | None
) -> torch.Tensor:
    if weight is not None:
        return weight[expert].float()
    if blocks is None or scales is None:
        raise ValueError("experts need a weight, or blocks and scales")
    return dequantise(blocks[expert], scales[expert])
