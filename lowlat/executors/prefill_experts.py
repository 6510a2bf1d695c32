"""A mixture of experts in prefill: rows grouped by expert, some experts' matrices expanded at once, a batched product.

The rounding points are those of `lowlat.kernels.reference.experts`. Matrices are expanded into one workspace, which the
next group of experts takes over. A chunk's products have other shapes for other choices, so its bits depend on all of
its own tokens: a chunk is only ever shared as a whole.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors.expansion import Expansion
from lowlat.executors.launcher import Launcher
from lowlat.graphs.launch import Launch
from lowlat.kernels.expand_expert import expand_experts
from lowlat.kernels.expert_packing import PackedExperts, unpack_expert

__all__ = ["ChunkExperts", "choose_experts", "expand_by_kernel", "expand_by_torch", "product"]

CAPACITY_STEP = 16  # pairs of an expert are padded to a multiple: fewer shapes to choose products for

# experts, ids [n] int32, out [n, N, K] bf16: the matrices of the first are written to the last
Expand = Callable[[PackedExperts, torch.Tensor, torch.Tensor], None]


def expand_by_torch(experts: PackedExperts, ids: torch.Tensor, out: torch.Tensor) -> None:
    """An `Expand` for any device, some thirty operations an expert."""
    for place, expert in enumerate(ids.tolist()):
        out[place] = unpack_expert(experts, expert)


def expand_by_kernel(
    launcher: Launcher, products: Mapping[str, PackedExperts], ids: torch.Tensor, room: torch.Tensor
) -> Expand:
    """An `Expand` of one launch, on torch's current stream; kernels are compiled and loaded here.

    products  all that will be expanded
    ids       [E] int32; what is asked for later are parts of it: launches are kept by their place in it
    room      bf16, for one matrix at least; it is not written here
    Raises ShapeError for matrices that the kernel does not take.
    """
    orders: dict[int, torch.Tensor | None] = {}
    known: dict[tuple[int, int, int, int], Launch] = {}

    def call(experts: PackedExperts, part: torch.Tensor, out: torch.Tensor) -> Any:
        return expand_experts(experts, part, out=out, order=orders[experts.words.data_ptr()])[0]

    def expand(experts: PackedExperts, part: torch.Tensor, out: torch.Tensor) -> None:
        key = (experts.words.data_ptr(), part.data_ptr(), part.numel(), out.data_ptr())
        if key not in known:
            known[key] = launcher.prepare(call(experts, part, out))
        known[key].issue(launcher.stream())

    calls = []
    for experts in products.values():
        order = experts.order
        orders[experts.words.data_ptr()] = None if order is None else order.to(launcher.device, torch.int32)
        matrix = room[: experts.rows * experts.columns].view(1, experts.rows, experts.columns)
        calls.append(call(experts, ids[:1], matrix))
    launcher.compile_ahead(calls)
    for each in calls:
        launcher.prepare(each)
    return expand


@dataclass(frozen=True)
class _Group:
    """Experts whose products are done together, each with as many places as the one with most pairs needs.

    experts  of the list of experts, those of most pairs first
    pairs    of the list of pairs, which are in the order of that list
    places   of the padded list of pairs
    """

    experts: slice
    pairs: slice
    places: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Experts, and the places of each."""
        count = self.experts.stop - self.experts.start
        return count, (self.places.stop - self.places.start) // count


@dataclass(frozen=True)
class _Choice:
    """The pairs (row, rank) of a chunk, grouped by expert.

    pairs    [P] int64  the pairs, as row * R + rank, by expert
    experts  [P] int64  the expert of each
    places   [P] int64  where it stands among its group's places
    padded   [T] int64  the pair of each place; any pair in places that no pair has
    """

    groups: tuple[_Group, ...]
    pairs: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor
    padded: torch.Tensor


def choose_experts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, expert_ids: torch.Tensor, expert_weights: torch.Tensor
) -> None:
    """The choice of a whole chunk, no row of which is dead: see `reference.experts.router`."""
    logits = product(x, weight) + bias.float()
    chosen = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, : expert_ids.shape[1]]
    expert_ids.copy_(chosen)
    expert_weights.copy_(torch.softmax(logits.gather(1, chosen), -1))


def _add_by_rank(by_rank: torch.Tensor, expert_weights: torch.Tensor, out: torch.Tensor) -> None:
    """Products [M, R, N] float32, each times its share [M, R], added from the first rank to the last: out [M, N]."""
    out.zero_()
    for rank in range(by_rank.shape[1]):
        out += expert_weights[:, rank, None] * by_rank[:, rank]


class ChunkExperts:
    """The mixtures of one chunk, layer by layer: the choice, then its two products.

    size    of the room for expanded matrices
    room    [size.elements] bf16: it belongs to this while a chunk runs
    ids     [E] int32: the experts, those of most pairs first
    expand  how matrices are expanded; it is given parts of `ids`
    The host waits for the device once a layer, to learn how many pairs each expert has.
    """

    def __init__(self, size: Expansion, room: torch.Tensor, ids: torch.Tensor, expand: Expand) -> None:
        self._size, self._room, self._ids, self._expand = size, room, ids, expand
        # written when the device has read what the layer before left there: the host has waited since
        self._bases = torch.empty(2 * ids.numel(), dtype=torch.int64, pin_memory=ids.is_cuda)
        self._choice: _Choice | None = None

    def router(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        *,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
    ) -> None:
        """`choose_experts`, and how the pairs are grouped for the products to come."""
        choose_experts(x, weight, bias, expert_ids=expert_ids, expert_weights=expert_weights)
        self.choose(expert_ids)

    def choose(self, expert_ids: torch.Tensor) -> None:
        """Group the pairs of the products to come; expert_ids [M, R] int32, no expert twice in a row, none dead."""
        chosen = expert_ids.reshape(-1).long()
        arange = torch.arange(max(chosen.numel(), self._ids.numel()), device=chosen.device)
        counts = torch.zeros_like(arange[: self._ids.numel()]).scatter_add_(0, chosen, torch.ones_like(chosen))
        counts, ranked = counts.sort(descending=True, stable=True)
        self._ids.copy_(ranked)
        rank_of = torch.empty_like(ranked).scatter_(0, ranked, arange[: ranked.numel()])
        ranks, pairs = rank_of[chosen].sort(stable=True)
        within = arange[: pairs.numel()] - (counts.cumsum(0) - counts)[ranks]
        groups = tuple(_groups(counts.tolist(), self._size.count, expert_ids.shape[0]))
        own = [place * capacity for group in groups for count, capacity in [group.shape] for place in range(count)]
        starts = [group.places.start for group in groups for _ in range(group.shape[0])]
        bases = self._bases[: 2 * len(own)].copy_(torch.tensor(own + starts)).view(2, -1)
        bases = bases.to(chosen.device, non_blocking=True)
        places, starts_of = bases[:, ranks]
        places = places + within
        padded = torch.zeros(groups[-1].places.stop, dtype=torch.int64, device=chosen.device)
        padded[places + starts_of] = pairs
        self._choice = _Choice(groups, pairs, ranked[ranks], places, padded)

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
    ) -> None:
        """Gate and up products and the clamped SwiGLU: see `reference.experts.experts_gate_up`.

        experts  [E, 2I, N]  packed
        bias     [E, 2I]     in the matrices' original order
        """
        flat = out.view(expert_ids.numel(), -1)
        for pairs, products in self._products(x, expert_ids.shape[1], experts, bias):
            gate, up = products.chunk(2, -1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            flat.index_copy_(0, pairs, ((up + 1.0) * (gate * torch.sigmoid(gate * alpha))).to(out.dtype))

    def down(
        self,
        activated: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        *,
        experts: PackedExperts,
        bias: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Down products, weighed and added by rank: see `reference.experts.experts_down`.

        experts  [E, N, I]  packed
        """
        rows, count = expert_ids.shape
        by_pair = torch.empty(rows * count, experts.rows, dtype=torch.float32, device=out.device)
        for pairs, products in self._products(activated.view(rows * count, -1), 1, experts, bias):
            by_pair.index_copy_(0, pairs, products)
        _add_by_rank(by_pair.view(rows, count, -1), expert_weights, out)

    def _products(
        self, inputs: torch.Tensor, pairs_a_row: int, experts: PackedExperts, bias: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs [n] and their products with their experts, biases added, float32 [n, N]: every pair once."""
        choice = self._choice
        if choice is None:
            raise ConfigError("experts' products come behind their router's choice")
        rows = choice.padded // pairs_a_row
        size = experts.rows * experts.columns
        for group in choice.groups:
            count, capacity = group.shape
            matrices = self._room[: count * size].view(count, experts.rows, experts.columns)
            self._expand(experts, self._ids[group.experts], matrices)
            padded = inputs.index_select(0, rows[group.places]).view(count, capacity, -1)
            products = _batched(padded, matrices).view(-1, experts.rows).index_select(0, choice.places[group.pairs])
            products += bias[choice.experts[group.pairs]]
            yield choice.pairs[group.pairs], products


def _groups(counts: list[int], most: int, num_rows: int) -> Iterator[_Group]:
    """Cut experts of these many pairs, most first, into groups of at most `most`; those of none are left out.

    A group has no more places than a chunk has rows, but for one expert alone: no expert has a row twice.
    """
    used = list(takewhile(bool, counts))
    expert = pair = place = 0
    while expert < len(used):
        capacity = -(-used[expert] // CAPACITY_STEP) * CAPACITY_STEP
        count = min(most, len(used) - expert, max(1, num_rows // capacity))
        pairs, places = sum(used[expert : expert + count]), count * capacity
        yield _Group(slice(expert, expert + count), slice(pair, pair + pairs), slice(place, place + places))
        expert, pair, place = expert + count, pair + pairs, place + places


def _batched(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [n, c, K] @ weights.T [n, K, N], accumulated in float32."""
    if x.is_cuda:
        return torch.bmm(x, weights.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(x.float(), weights.float().transpose(1, 2))


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight.T [K, N] bf16, accumulated in float32: float32 [M, N]."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(x.float(), weight.float().t(), out=out)
