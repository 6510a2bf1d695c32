"""The rule for a mixture of experts: the norm with the router, then both products and the sum.

The router leaves logits in a workspace, where the products, which choose by them, await them.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lowlat.errors import ConfigError
from lowlat.executors.lowering.gemm_rules import normed_linear
from lowlat.executors.lowering.lowering import Covered, Lowering, Rule, unsupported
from lowlat.executors.lowering.weight_layouts import experts_name
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.moe.router import RouterNorm, router_logits
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.rows.norm import rms_norm

__all__ = ["EXPERT_RULES"]

PARTIALS = "experts.partials"  # what each of a row's experts adds to it
LOGITS = ("router.logits.even", "router.logits.odd")  # each mixture fills the next one's, before that one may begin
MIXTURE = ("rms_norm", "router", "experts_gate_up", "experts_down", "add")


def _rms_norm(lowering: Lowering, start: int) -> Covered:
    """A norm, with the mixture of experts that reads it, or with another product."""
    following = lowering.following(start)
    if following is not None and following.kind == "router":
        return _mixture(lowering, start)
    weight = lowering.weights.vector(lowering.program.ops[start].weights["weight"])
    return normed_linear(lowering, start) or Covered(1, rms_norm(**lowering.arguments(start), weight=weight))


def _mixture(lowering: Lowering, start: int) -> Covered:
    """From the norm before the router to the sum into the residual stream."""
    if not lowering.kinds(start, *MIXTURE):
        return unsupported(lowering, start + 1)
    _check_mixture(lowering, start)
    norm, routed, first, second, total = (lowering.arguments(start + place) for place in range(len(MIXTURE)))
    ops = lowering.program.ops[start : start + len(MIXTURE)]
    num_experts = lowering.weights.vector(ops[1].weights["bias"]).shape[0]
    rows, number = routed["x"].shape[0], sum(op.kind == "router" for op in lowering.program.ops[:start])
    room = (-(-rows * num_experts // 4) * 4,)  # in whole 16 bytes
    own, following = (lowering.workspace(LOGITS[(number + k) % 2], room, torch.float32) for k in range(2))
    logits = own[: rows * num_experts].view(rows, num_experts)
    routing = TopKRouting(logits, routed.get("row_live"))
    partials = lowering.workspace(PARTIALS, (*first["out"].shape[:2], second["out"].shape[1]), torch.float32)
    calls = router_logits(
        norm["x"],
        norm=RouterNorm(lowering.weights.vector(ops[0].weights["weight"]), norm["eps"], norm["out"], routing.row_live),
        logits=logits,
        awaited=(first["out"], partials, following),
        **lowering.vectors(start + 1),
        card=lowering.card,
    )
    calls += experts_mlp(
        x=first["x"],
        routing=routing,
        gate_up=lowering.weights.experts(experts_name(ops[2])),
        gate_up_bias=lowering.weights.experts_bias(experts_name(ops[2])),
        down=lowering.weights.experts(experts_name(ops[3])),
        down_bias=lowering.weights.vector(ops[3].weights["bias"]),
        expert_ids=routed["expert_ids"],
        expert_weights=routed["expert_weights"],
        activated=first["out"],
        partials=partials,
        residual=total["a"],
        total=total["out"],
        limit=first["limit"],
        alpha=first["alpha"],
        early=number > 0,  # nobody filled the first one's logits
        card=lowering.card,
    )
    return Covered(len(MIXTURE), calls, [ops[3].writes["out"]])


def _check_mixture(lowering: Lowering, start: int) -> None:
    """Raise ConfigError unless each operation reads what those before it wrote, and nobody else reads the last."""
    norm, router_, first, second, total = lowering.program.ops[start : start + len(MIXTURE)]
    chosen = [router_.writes[name] for name in ("expert_ids", "expert_weights")]
    linked = (
        router_.reads["x"] == first.reads["x"] == norm.writes["out"]
        and router_.reads.get("row_live") == norm.reads.get("row_live")
        and first.reads["expert_ids"] == chosen[0]
        and [second.reads[name] for name in ("expert_ids", "expert_weights")] == chosen
        and second.reads["activated"] == first.writes["out"]
        and total.reads["b"] == second.writes["out"]
    )
    if not linked:
        raise ConfigError(
            f"{lowering.program.name}: a mixture of experts around {router_} whose operations do not read what those "
            "before them wrote"
        )
    if not lowering.dies(second.writes["out"], start + len(MIXTURE) - 1):
        raise ConfigError(f"{lowering.program.name}: {second.writes['out']} is read by others than the sum after it")


EXPERT_RULES: Mapping[str, Rule] = MappingProxyType(
    {"experts_down": unsupported, "experts_gate_up": unsupported, "rms_norm": _rms_norm}
)
