"""This module has the operations of an MoE layer: router, gated activation, weighted sum over each row's experts.

Experts' matrices [E, out, in] are given as the arrays of their format (`kernels.formats`). gate_up has all gate rows,
then all up rows. A call expands each expert that any row chose once.
Source: gpt-oss model card, arXiv 2508.10925, section 2, and the reference implementation's clamped SwiGLU; Qwen3,
arXiv 2505.09388, with plain SwiGLU and no biases.
"""

import itertools
from collections.abc import Iterator, Mapping

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.kernels.formats import format_of
from lowlat.kernels.reference.collectives.cuts import bounds, tree_sum
from lowlat.kernels.reference.elementwise.elementwise import activation_of
from lowlat.kernels.reference.gemm.linear import ROW_BLOCK, linear, linear_block
from lowlat.kernels.reference.row_blocks import sigmoid
from lowlat.kernels.reference.shapes import check_shape, live_rows

__all__ = ["experts_down", "experts_gate_up", "router"]

FORMS = (("weight",), ("blocks", "scales"))  # plain, or MXFP4


@operation("""
    read    x               compute  [M, N]
    weight  weight          float    [E, N]    with a shared expert, its row is the last
    weight  bias            float    [E]       absent: none
    weight  scale           float32  [E]       multiplies experts' weights; absent: none. A shared expert's is the last
    read    row_live        uint8    flat [M]  absent: all live
    write   expert_ids      int32    [M, k]    largest logit first, the lowest id among equals; -1 in dead rows
    write   expert_weights  float32  [M, k]    0 in dead rows
""")
def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    over_all: bool = False,
    shared: bool = False,
    row_block: int = ROW_BLOCK,
) -> None:
    """Choose each row's k experts of the largest logits, and their weights by softmax over the chosen experts.

    The weights equal those of the softmax over all experts, renormalised to sum to 1.

    over_all  weights are those of the softmax over all experts, and sum to less than 1
    shared    the last of the E experts is the last expert of every row, and its weight is the sigmoid of its logit. A
              row chooses k - 1 of the others, whose softmax leaves it out
    A weight is multiplied by its expert's scale last. Logits are float32, never rounded to the compute dtype. Raises
    ShapeError for shapes that do not fit.
    """
    rows, top_k = expert_ids.shape
    if top_k > weight.shape[0] or top_k <= shared:
        raise ShapeError(f"{top_k} experts a token of {weight.shape[0]} experts{', one of them shared' * shared}")
    check_shape("expert_weights", expert_weights, x.shape[0], top_k)
    routed, chosen = weight.shape[0] - shared, top_k - shared
    logits = torch.empty(rows, weight.shape[0], dtype=torch.float32, device=x.device)
    linear(x, weight, bias, out=logits, row_block=row_block)
    for index, alive in enumerate(live_rows(row_live, rows)):
        if alive:
            own = logits[index, :routed]
            order = torch.argsort(own, descending=True, stable=True)[:chosen]
            expert_ids[index, :chosen] = order
            expert_weights[index, :chosen] = torch.softmax(own, 0)[order] if over_all else torch.softmax(own[order], 0)
            if shared:
                expert_ids[index, chosen] = routed
                expert_weights[index, chosen] = sigmoid(logits[index, routed:])[0]
            if scale is not None:
                expert_weights[index] *= scale[expert_ids[index].long()]
        else:
            expert_ids[index] = -1
            expert_weights[index] = 0.0


def _expert_matrices(
    expert_ids: torch.Tensor, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each chosen expert once: its id, the places in the flat ids that chose it, and its [out, in] matrix.

    A quantised matrix is expanded to float32 on a CPU. On a GPU, which multiplies `dtype` natively, it is expanded to
    `dtype`; that is exact, too.
    """
    weight_format, given = format_of(parts), parts.get("weight")
    is_wide = not expert_ids.is_cuda or (given is not None and given.dtype == torch.float32)
    expanded = torch.float32 if is_wide else dtype
    flat = expert_ids.reshape(-1)
    for expert in sorted(set(flat.tolist()) - {-1}):
        pairs = (flat == expert).nonzero()[:, 0]
        yield expert, pairs, weight_format.dequantise({name: part[expert] for name, part in parts.items()}, expanded)


def _given(
    weight: torch.Tensor | None, blocks: torch.Tensor | None, scales: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the arrays of the experts' matrices that are not None, by name."""
    parts = {"weight": weight, "blocks": blocks, "scales": scales}
    return {name: part for name, part in parts.items() if part is not None}


def _products(
    inputs: torch.Tensor,
    source: torch.Tensor,
    expert_ids: torch.Tensor,
    width: int,
    bias: torch.Tensor | None,
    parts: Mapping[str, torch.Tensor],
    row_block: int,
    ends: tuple[int, ...],
) -> torch.Tensor:
    """Multiply each (row, expert) pair over each part of K: [parts, M * k, width] float32.

    A pair without an expert gives zero. The bias is added to the first part.

    inputs [n, in]; source [M * k] int64: the input row of each pair; ends: the start of each part, and the last end
    """
    spans = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
    out = torch.zeros(len(spans), expert_ids.numel(), width, dtype=torch.float32, device=inputs.device)
    for expert, pairs, matrix in _expert_matrices(expert_ids, parts, inputs.dtype):
        for index, span in enumerate(spans):
            own = matrix[:, span].contiguous()
            for part in pairs.split(row_block):
                product = linear_block(inputs[source[part]][:, span], own, row_block)
                out[index, part] = product if bias is None or index else product + bias[expert].float()
    return out


@operation(
    """
    read    x           compute  [M, N]
    read    expert_ids  int32    [M, k]                  -1 dead
    weight  bias        float    [E, 2 * I]              all gate rows, then all up rows; absent: none
    weight  weight      float    [E, 2 * I, N]           plain weights, or MXFP4's
    weight  blocks      uint8    [E, 2 * I, N / 32, 16]
    weight  scales      uint8    [E, 2 * I, N / 32]
    write   out         compute  [M, k, I]               zero where dead
    """,
    forms=FORMS,
)
def experts_gate_up(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    activation: str = "silu",
    row_block: int = ROW_BLOCK,
) -> None:
    """Compute the gate and up products of the chosen experts, and their gated activation.

    out is up * activation(gate), with "silu" or "gelu_tanh", see `silu_mul`. With limit and alpha it is clamped SwiGLU:
    (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up within +-`limit`. All is computed in float32
    and rounded once.
    row_block   rows a product: an expert's pairs are multiplied in blocks of so many, in order of rows
    Raises ShapeError for shapes that do not fit, and ValueError for an unknown activation.
    """
    rows, top_k = expert_ids.shape
    parts, activate = _given(weight, blocks, scales), activation_of(activation)
    _, width, depth = format_of(parts).shape(parts)
    check_shape("out", out, rows, top_k, width // 2)
    check_shape("x", x, rows, depth)
    source = torch.arange(rows * top_k, device=x.device) // top_k
    products = _products(x, source, expert_ids, width, bias, parts, row_block, (0, depth))[0]
    flat = out.view(rows * top_k, -1)
    flat.zero_()
    for pair, expert in enumerate(expert_ids.reshape(-1).tolist()):
        if expert < 0:
            continue
        gate, up = products[pair].chunk(2)
        if limit is None or alpha is None:
            flat[pair] = activate(gate) * up
        else:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            flat[pair] = (up + 1.0) * (gate * sigmoid(gate * alpha))


@operation(
    """
    read    activated       compute  [M, k, I]
    read    expert_ids      int32    [M, k]              -1 dead
    read    expert_weights  float32  [M, k]
    weight  bias            float    [E, N]              absent: none
    weight  weight          float    [E, N, I]           plain weights, or MXFP4's
    weight  blocks          uint8    [E, N, I / 32, 16]
    weight  scales          uint8    [E, N, I / 32]
    write   out             float32  [M, N]              zero for a dead row
    """,
    forms=FORMS,
)
def experts_down(
    activated: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    row_block: int = ROW_BLOCK,
    num_parts: int = 1,
    unit: int = 1,
) -> None:
    """Compute the down products of the chosen experts, and their weighted sum, from a row's first expert to its last.

    out is the sum of weight * (down @ activated + bias). Every product and every sum is rounded by itself. row_block is
    as in `experts_gate_up`.

    num_parts  parts of I, cut in whole units as `linear` cuts K. Each part gives such a sum, the first with the bias,
               and `collectives.cuts.tree_sum` adds them. If it is given, even as 1, kernels sum in that order, too
    Raises ShapeError for shapes that do not fit.
    """
    rows, top_k = expert_ids.shape
    parts = _given(weight, blocks, scales)
    _, width, depth = format_of(parts).shape(parts)
    check_shape("out", out, rows, width)
    check_shape("activated", activated, rows, top_k, depth)
    source = torch.arange(rows * top_k, device=activated.device)
    inputs = activated.reshape(rows * top_k, -1)
    products = _products(inputs, source, expert_ids, width, bias, parts, row_block, bounds(depth, num_parts, unit))
    sums = []
    for of_part in products.reshape(num_parts, rows, top_k, -1):
        sums.append(torch.zeros_like(out))
        for k in range(top_k):
            share = torch.where(expert_ids[:, k] >= 0, expert_weights[:, k], 0.0)
            sums[-1] += share[:, None] * of_part[:, k]
    out.copy_(tree_sum(sums))
