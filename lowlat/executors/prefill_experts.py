"""A mixture of experts in prefill, by torch: rows sorted by expert, one product an expert, no loop over rows.

The rounding points are those of `lowlat.kernels.reference.experts`. An expert's matrix is expanded when its turn comes;
there is never more than one. A chunk's products have other shapes for other choices, so its bits depend on all of its
own tokens: a chunk is only ever shared as a whole.
"""

from collections.abc import Iterator

import torch

from lowlat.kernels.expert_packing import PackedExperts, unpack_expert

__all__ = ["prefill_experts_down", "prefill_experts_gate_up", "prefill_router"]


def prefill_router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, expert_ids: torch.Tensor, expert_weights: torch.Tensor
) -> None:
    """The choice of a whole chunk, no row of which is dead: see `reference.experts.router`."""
    logits = _product(x, weight) + bias.float()
    chosen = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, : expert_ids.shape[1]]
    expert_ids.copy_(chosen)
    expert_weights.copy_(torch.softmax(logits.gather(1, chosen), -1))


def prefill_experts_gate_up(
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
    order, known = _sort(expert_ids)
    products = _products(x[order // expert_ids.shape[1]], known, experts)
    products += bias[known].float()
    gate, up = products.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    flat = out.view(expert_ids.numel(), -1)
    flat[order] = ((up + 1.0) * (gate * torch.sigmoid(gate * alpha))).to(out.dtype)


def prefill_experts_down(
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
    order, known = _sort(expert_ids)
    products = _products(activated.view(rows * count, -1)[order], known, experts)
    products += bias[known].float()
    by_pair = torch.empty_like(products)
    by_pair[order] = products
    by_rank = by_pair.view(rows, count, -1)
    out.zero_()
    for rank in range(count):
        out += expert_weights[:, rank, None] * by_rank[:, rank]


def _sort(expert_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The flat (row, rank) pairs in order of their experts, and those experts; equal ones keep their order."""
    known, order = expert_ids.reshape(-1).sort(stable=True)
    return order, known.long()


def _products(inputs: torch.Tensor, known: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """Each pair's product with its expert, float32 [M * k, N]; pairs come sorted by expert."""
    out = torch.empty(inputs.shape[0], experts.rows, dtype=torch.float32, device=inputs.device)
    for expert, part in _runs(known, experts.num_experts):
        _product(inputs[part], unpack_expert(experts, expert), out[part])
    return out


def _runs(known: torch.Tensor, num_experts: int) -> Iterator[tuple[int, slice]]:
    """Each expert that occurs, and where; the device is asked once."""
    begin = 0
    for expert, count in enumerate(torch.bincount(known, minlength=num_experts).tolist()):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


def _product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T accumulated in float32."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(x.float(), weight.float().t(), out=out)
