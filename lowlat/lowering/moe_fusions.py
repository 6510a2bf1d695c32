"""These fusions cover an MoE layer: in a step the norm with the router, then the rest; in prefill the experts' GEMMs.

In a step the router writes logits to a workspace, and the blocks of the next launch await them word by word. To mark
missing words, each MoE layer fills the next one's workspace with sentinels before that one may begin. All layers of a
program, the draft model's included, have workspaces of one size, so that all rows of the next one are filled.
"""

from collections.abc import Sequence

import torch

from lowlat.graphs.program import Op
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.moe.plan import partials_workspace
from lowlat.kernels.moe.prefill.experts import prefill_experts
from lowlat.kernels.moe.router import RouterNorm, router, router_logits
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call, decodes, in_parts
from lowlat.lowering.fusion import Fusion, Run
from lowlat.lowering.row_fusions import adds_ranks, gathered
from lowlat.lowering.weight_parts import experts_name

__all__ = ["MOE_FUSIONS"]

MOE = "rms_norm router experts_gate_up experts_down gather_ranks? sum_ranks? add"
LOGITS = ("moe.logits.even", "moe.logits.odd")


def _mixes(run: Run, gpu: Gpu) -> bool:
    """Whether each operation reads the one before it by the right argument, and K is not summed in parts."""
    norm, routing, gate_up, down, *all_reduce, total = run.ops
    summed = down
    if all_reduce:
        gather, summed = all_reduce
        if gpu.is_shared or gather.reads["x"] != down.writes["out"] or not adds_ranks(run):
            return False
    chosen = [routing.writes[name] for name in ("expert_ids", "expert_weights")]
    return (
        decodes(routing)
        and "scale" not in routing.weights
        and not in_parts(down)
        and routing.reads["x"] == gate_up.reads["x"] == norm.writes["out"]
        and routing.reads.get("row_live") == norm.reads.get("row_live")
        and gate_up.reads["expert_ids"] == chosen[0]
        and [down.reads[name] for name in ("expert_ids", "expert_weights")] == chosen
        and down.reads["activated"] == gate_up.writes["out"]
        and total.reads["b"] == summed.writes["out"]
    )


def _summed(run: Run) -> list[str]:
    own = [run.op("experts_down").writes["out"]]
    return own if run.find("gather_ranks") is None else [*own, *gathered(run)]


def _gate_up(run: Run) -> dict[str, torch.Tensor]:
    op = run.op("experts_gate_up")
    return {experts_name(op): gate_up_permutation(run.shape(op.writes["out"])[2])}


def _moe(binding: Binding, run: Run) -> Sequence[Call]:
    norm_op, router_op, gate_up, down, *all_reduce, add = run.ops
    norm, routed, first, second, total = (binding.arguments(op) for op in (norm_op, router_op, gate_up, down, add))
    weights = binding.weights
    num_experts = weights.vector(router_op.weights["weight"]).shape[0]
    rows, number = routed["x"].shape[0], binding.num_awaited
    binding.num_awaited += 1
    size = (_most_logits(binding),)  # the same for all layers: the next one may have more rows than a draft step
    own, following = (binding.workspace(LOGITS[(number + k) % 2], size, torch.float32) for k in range(2))
    logits = own[: rows * num_experts].view(rows, num_experts)
    shared = routed.get("shared", False)
    routing = TopKRouting(logits, routed.get("row_live"), routed["over_all"], shared)
    top_k, width = first["out"].shape[1], second["out"].shape[1]
    partials = binding.workspace(*partials_workspace(rows, top_k, width))
    calls = router_logits(
        norm["x"],
        norm=_norm(binding, norm_op),
        logits=routing.logits,
        awaited=(first["out"], partials, following),
        **binding.vectors(router_op),
        gpu=binding.gpu,
    )
    return calls + experts_mlp(
        x=first["x"],
        routing=routing,
        gate_up=weights.experts(experts_name(gate_up)),
        gate_up_bias=weights.experts_bias(experts_name(gate_up)) if "bias" in gate_up.weights else None,
        down=weights.experts(experts_name(down)),
        down_bias=weights.vector(down.weights["bias"]) if "bias" in down.weights else None,
        expert_ids=routed["expert_ids"],
        expert_weights=routed["expert_weights"],
        activated=first["out"],
        partials=partials,
        residual=total["a"],
        total=total["out"],
        limit=first["limit"],
        alpha=first["alpha"],
        activation=first.get("activation", "silu"),
        early=number > 0,  # no layer filled the first one's logits
        peers=binding.peer_rows(width, "moe") if all_reduce else None,
        many=binding.shares_rows,
        gpu=binding.gpu,
    )


def _most_logits(binding: Binding) -> int:
    """The largest number of router logits of the program's MoE layers, rounded up to 16 bytes."""
    most = max(
        binding.buffers[op.reads["x"]].shape[0] * binding.weights.vector(op.weights["weight"]).shape[0]
        for op in binding.program.ops
        if op.kind == "router" and decodes(op)
    )
    return -(-most // 4) * 4


def _norm(binding: Binding, op: Op) -> RouterNorm:
    given = binding.arguments(op)
    return RouterNorm(binding.weights.vector(op.weights["weight"]), given["eps"], given["out"], given.get("row_live"))


def _norms_routed(run: Run, gpu: Gpu) -> bool:
    routing = run.op("router")
    return decodes(routing) and routing.reads["x"] == run.op("rms_norm").writes["out"]


def _normed_router(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower the norm of all rows, which is written, and top-k routing."""
    routing = run.op("router")
    given, norm = binding.arguments(routing), _norm(binding, run.op("rms_norm"))
    given["x"] = binding.buffers[run.op("rms_norm").reads["x"]]
    vectors = binding.vectors(routing)
    return router(**given, **vectors, norm=norm, workspace=binding.workspace, gpu=binding.gpu)


def _grouped(run: Run, gpu: Gpu) -> bool:
    gate_up, down = run.op("experts_gate_up"), run.op("experts_down")
    feeds = down.reads["activated"] == gate_up.writes["out"]
    return (
        not decodes(down) and not in_parts(down) and feeds and gate_up.reads["expert_ids"] == down.reads["expert_ids"]
    )


def _activated(run: Run) -> list[str]:
    return [run.op("experts_gate_up").writes["out"]]


def _experts(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower both GEMMs over many rows with one grouping of their (row, expert) pairs."""
    gate_up, down = run.op("experts_gate_up"), run.op("experts_down")
    first, second, weights = binding.arguments(gate_up), binding.arguments(down), binding.weights
    return prefill_experts(
        first["x"],
        first["expert_ids"],
        second["expert_weights"],
        gate_up=weights.experts(experts_name(gate_up)),
        gate_up_bias=weights.experts_bias(experts_name(gate_up)) if "bias" in gate_up.weights else None,
        down=weights.experts(experts_name(down)),
        down_bias=weights.vector(down.weights["bias"]) if "bias" in down.weights else None,
        activated=first["out"],
        out=second["out"],
        limit=first["limit"],
        alpha=first["alpha"],
        activation=first.get("activation", "silu"),
        workspace=binding.workspace,
        gpu=binding.gpu,
    )


MOE_FUSIONS = (
    Fusion(
        "moe", MOE, 3, _moe, _mixes, _summed, _gate_up
    ),
    Fusion("norm+router", "rms_norm router", 1, _normed_router, _norms_routed),
    Fusion("experts", "experts_gate_up experts_down", 1, _experts, _grouped, _activated),
)  # fmt: skip
