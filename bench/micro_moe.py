"""MoE layers with a shared expert, each to be timed as a step has it: the router with its norm, then the experts.

Layers follow each other as in a model: they leave logits in two places in turn and share the memory that is awaited.
Every copy has rows of its own, so that it chooses other experts; two layers' weights take turns, so that the shared
expert, which every copy reads, has left the L2 by the time it is read again.
"""

from dataclasses import dataclass
from typing import Any

import torch

from bench.micro import Entry
from lowlat.kernels.formats import BF16, MATRIX_FORMATS, WeightFormat
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.moe.formats import experts_format
from lowlat.kernels.moe.packing import PackedExperts, allocate_experts, bytes_an_expert
from lowlat.kernels.moe.router import RouterNorm, router_logits
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall

__all__ = ["SIZES", "MoeSize", "moe_layers"]

COPIES, LAYERS = 16, 2
ROWS = (1, 4)
QUANTISED = ("fp8", "fp8_block", "int4_128")


@dataclass(frozen=True)
class MoeSize:
    """An MoE layer: E experts of which k are chosen, next to a shared one of the same inner size."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    inner: int


SIZES = (MoeSize("qwen3.6-35b-a3b", 256, 8, 2048, 512), MoeSize("qwen3-coder-next", 512, 10, 2048, 512))


def moe_layers(size: MoeSize, device: torch.device, gpu: Gpu) -> list[Entry]:
    """An entry for each format and number of rows; formats' weights are kept as long as their entries."""
    formats = {"bf16": BF16, **{name: _tiled(name, size) for name in QUANTISED}}
    return [
        _entry(f"moe {size.name} {name}, {rows} rows", size, layers, rows, gpu)
        for name, weight_format in formats.items()
        for layers in [[_make_layer(size, weight_format, device) for _ in range(LAYERS)]]
        for rows in ROWS
    ]


def _tiled(name: str, size: MoeSize) -> WeightFormat:
    """A dense format as experts of this size have it."""
    specs = MATRIX_FORMATS[name].specs(size.hidden, size.inner, torch.bfloat16)
    return experts_format({part: torch.zeros((1, *shape), dtype=dtype) for part, (shape, dtype) in specs.items()})


@dataclass(frozen=True)
class _Layer:
    """Random weights: the router [E + 1, N] and both stacks of matrices."""

    router: torch.Tensor
    gate_up: PackedExperts
    down: PackedExperts


def _make_layer(size: MoeSize, weight_format: WeightFormat, device: torch.device) -> _Layer:
    count = size.num_experts + 1
    given: dict[str, Any] = {"num_experts": count, "device": device}
    order = gate_up_permutation(size.inner)
    gate_up = allocate_experts(weight_format, rows=2 * size.inner, columns=size.hidden, order=order, **given)
    down = allocate_experts(weight_format, rows=size.hidden, columns=size.inner, **given)
    for tensor in (*gate_up.tensors, *down.tensors):
        if tensor.is_floating_point():
            tensor.normal_(0.0, 0.02)
        else:
            tensor.random_()
    router = torch.randn(count, size.hidden, device=device).mul_(size.hidden**-0.5).bfloat16()
    return _Layer(router, gate_up, down)


def _entry(name: str, size: MoeSize, layers: list[_Layer], rows: int, gpu: Gpu) -> Entry:
    device, top_k, hidden = layers[0].router.device, size.top_k + 1, size.hidden
    x = torch.randn(COPIES, rows, hidden, device=device).bfloat16()
    norm_weight, normed = torch.ones(hidden, device=device).bfloat16(), torch.empty_like(x[0])
    logits = torch.empty(2, -(-rows * (size.num_experts + 1) // 4) * 4, device=device)
    shared: dict[str, Any] = {
        "expert_ids": torch.empty(rows, top_k, dtype=torch.int32, device=device),
        "expert_weights": torch.empty(rows, top_k, device=device),
        "activated": torch.empty(rows, top_k, size.inner, device=device, dtype=torch.bfloat16),
        "partials": torch.empty(rows, top_k, hidden, device=device),
        "residual": torch.zeros_like(normed), "total": torch.empty_like(normed),
    }  # fmt: skip

    def calls(copy: int) -> list[KernelCall]:
        layer, (own, following) = layers[copy % LAYERS], (logits[copy % 2], logits[1 - copy % 2])
        mine = own[: rows * (size.num_experts + 1)].view(rows, -1)
        routed = router_logits(
            x[copy], layer.router, norm=RouterNorm(norm_weight, 1e-6, normed), logits=mine,
            awaited=(shared["activated"], shared["partials"], following), gpu=gpu,
        )  # fmt: skip
        routing = TopKRouting(mine, shared=True)
        return routed + experts_mlp(
            x=normed, routing=routing, gate_up=layer.gate_up, down=layer.down, early=copy > 0, gpu=gpu, **shared
        )

    distinct = [_distinct(size, x[copy], layers[copy % LAYERS].router) for copy in range(COPIES)]
    experts = sum(distinct) / COPIES
    matrices = bytes_an_expert((*layers[0].gate_up.arguments, *layers[0].down.arguments))
    moved = round(experts * matrices) + layers[0].router.nbytes
    conditions = {"rows": rows, "distinct_experts": round(experts, 2), "bytes_are": "experts that rows chose, router"}
    return Entry(name, calls, COPIES, moved, conditions=conditions)


def _distinct(size: MoeSize, x: torch.Tensor, router: torch.Tensor) -> int:
    """The experts that rows choose, the shared one among them."""
    chosen = (x.float() @ router[: size.num_experts].float().t()).topk(size.top_k).indices
    return int(chosen.unique().numel()) + 1
