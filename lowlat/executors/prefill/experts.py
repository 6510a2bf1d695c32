"""A mixture of experts in prefill: rows choose, pairs of a row and a rank are grouped by expert, groups are multiplied.

On a card our kernels do all of it, from packed weights; a pair's bits so depend on its row and its expert alone, rows
that nobody reads cost no expert's weights, and the host does not wait for the device. Without a launcher torch does it,
expert after expert, for tests on a CPU. The rounding points are those of `lowlat.kernels.reference.moe.experts`.
"""

from collections.abc import Callable, Iterator

import torch

from lowlat.executors.prefill.kernels import Launches
from lowlat.executors.prefill.room import ExpertsRoom
from lowlat.kernels.moe.decode.topk_routing import Choice
from lowlat.kernels.moe.packing import PackedExperts, unpack_expert
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill.grouped_gemm import grouped_down, grouped_gate_up
from lowlat.kernels.moe.prefill.grouping import group_pairs
from lowlat.kernels.moe.prefill.pair_tiles import most_tiles, tile_pairs_of
from lowlat.kernels.moe.prefill.plan import GroupedPlan, plan_grouped
from lowlat.kernels.moe.prefill.rank_sum import add_ranks
from lowlat.kernels.moe.prefill.topk_routing import route_top_k
from lowlat.kernels.moe.router import router

__all__ = ["GroupedExperts", "choose_by_torch", "down_by_torch", "gate_up_by_torch", "product"]


class GroupedExperts:
    """Makes the choices and the products of a chunk's mixtures, of launches that are loaded later.

    room  uint8, at least `size.num_bytes`: one layer's logits, lists of pairs, and what its experts add to each row
    """

    def __init__(self, launches: Launches, size: ExpertsRoom, room: torch.Tensor) -> None:
        self._launches = launches
        self._order, self._tiles, self._values, self._logits = size.cut(room)

    def choose(
        self,
        x: torch.Tensor,
        row_live: torch.Tensor,
        *,
        norm_weight: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normed: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        eps: float,
    ) -> Callable[..., None]:
        """What norms all rows, and then lets the live ones choose, over these buffers."""
        rows, num_experts = x.shape[0], weight.shape[0]
        logits = self._logits[: rows * num_experts].view(rows, num_experts)
        calls = router(x, norm_weight, weight, bias, normed=normed, logits=logits, eps=eps, card=self._launches.card)
        choice = Choice(logits, row_live)
        return self._launches.add(
            calls + route_top_k(choice=choice, expert_ids=expert_ids, expert_weights=expert_weights)
        )

    def gate_up(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        *,
        experts: PackedExperts,
        bias: torch.Tensor,
        out: torch.Tensor,
        limit: float,
        alpha: float,
    ) -> Callable[..., None]:
        """What groups the pairs, and then does gate and up products and the clamped SwiGLU, over these buffers.

        bias  [E, 2I] in the matrices' own order
        """
        tile_pairs, lists = self._lists(expert_ids, experts)
        calls = group_pairs(expert_ids=expert_ids, num_experts=experts.num_experts, tile_pairs=tile_pairs, **lists)
        plan = self._plan(GATE_UP, experts, expert_ids, tile_pairs)
        calls += grouped_gate_up(x=x, **lists, weight=experts, bias=bias, out=out, limit=limit, alpha=alpha, plan=plan)
        return self._launches.add(calls)

    def down(
        self,
        activated: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        *,
        experts: PackedExperts,
        bias: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[..., None]:
        """Down products, weighed and added by rank; they must come right behind `gate_up` of the same ids.

        bias  [E, N]
        """
        tile_pairs, lists = self._lists(expert_ids, experts)
        plan = self._plan(DOWN, experts, expert_ids, tile_pairs)
        partials = self._values[: expert_ids.numel() * experts.rows].view(*expert_ids.shape, experts.rows)
        calls = grouped_down(
            activated=activated, **lists, expert_weights=expert_weights, weight=experts, bias=bias, out=partials,
            plan=plan,
        )  # fmt: skip
        return self._launches.add(calls + add_ranks(partials=partials, expert_ids=expert_ids, out=out))

    def _lists(self, expert_ids: torch.Tensor, experts: PackedExperts) -> tuple[int, dict[str, torch.Tensor]]:
        """Pairs of a tile, and the lists of pairs and of tiles."""
        count = expert_ids.numel()
        tile_pairs = tile_pairs_of(count, experts.num_experts)
        tiles = self._tiles[: most_tiles(count, experts.num_experts, tile_pairs)]
        return tile_pairs, {"order": self._order[:count], "tiles": tiles}

    def _plan(self, kind: str, experts: PackedExperts, expert_ids: torch.Tensor, tile_pairs: int) -> GroupedPlan:
        shape = ExpertShape(kind, experts.rows, experts.columns, expert_ids.shape[1], experts.format)
        return plan_grouped(tile_pairs, shape, self._launches.card)


def choose_by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    row_live: torch.Tensor,
    *,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    chunk: int,
) -> None:
    """What `reference.experts.router` means; chunk: as `product` takes it."""
    logits, dead = product(x, weight, chunk) + bias.float(), row_live[:, None] == 0
    chosen = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, : expert_ids.shape[1]]
    expert_ids.copy_(chosen.masked_fill(dead, -1))
    expert_weights.copy_(torch.softmax(logits.gather(1, chosen), -1).masked_fill(dead, 0.0))


def gate_up_by_torch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    experts: PackedExperts,
    bias: torch.Tensor,
    out: torch.Tensor,
    limit: float,
    alpha: float,
) -> None:
    """Gate and up products and the clamped SwiGLU: see `reference.experts.experts_gate_up`.

    bias  [E, 2I] in the original order
    """
    activated = out.view(expert_ids.numel(), -1).zero_()
    for pairs, products in _products(x, expert_ids.shape[1], expert_ids, experts, bias):
        gate, up = products.chunk(2, dim=1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        activated[pairs] = ((up + 1.0) * (gate * torch.sigmoid(gate * alpha))).to(out.dtype)


def down_by_torch(
    activated: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    experts: PackedExperts,
    bias: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Down products, weighed and added by rank: see `reference.experts.experts_down`."""
    by_pair = torch.zeros(expert_ids.numel(), experts.rows, dtype=torch.float32, device=activated.device)
    for pairs, products in _products(activated.flatten(0, 1), 1, expert_ids, experts, bias):
        by_pair[pairs] = products
    by_rank = by_pair.view(*expert_ids.shape, -1)
    out.zero_()
    for rank in range(by_rank.shape[1]):
        out += expert_weights[:, rank, None] * by_rank[:, rank]


def _products(
    inputs: torch.Tensor, pairs_a_row: int, expert_ids: torch.Tensor, experts: PackedExperts, bias: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs [n] of an expert and their products with it, its bias added, float32 [n, N]; dead ones are nobody's."""
    flat = expert_ids.reshape(-1)
    for expert in flat[flat >= 0].unique().tolist():
        pairs = (flat == expert).nonzero()[:, 0]
        rows = inputs[pairs // pairs_a_row]
        yield pairs, product(rows, unpack_expert(experts, expert), len(pairs)) + bias[expert].float()


def product(x: torch.Tensor, weight: torch.Tensor, chunk: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight.T [K, N] bf16, accumulated in float32: float32 [M, N].

    chunk  rows that are multiplied at a time, and fewer as the first of so many: the matrix library takes other ways
           for other shapes, and a chunk's bits must not depend on those beside it
    """
    short = -x.shape[0] % chunk
    if short:
        whole = product(torch.nn.functional.pad(x, (0, 0, 0, short)), weight, chunk)[: x.shape[0]]
        return whole if out is None else out.copy_(whole)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    columns = weight.t() if x.is_cuda else weight.float().t()
    for rows, results in zip(x.split(chunk), out.split(chunk), strict=True):
        if x.is_cuda:
            torch.mm(rows, columns, out_dtype=torch.float32, out=results)
        else:
            torch.mm(rows.float(), columns, out=results)
    return out
