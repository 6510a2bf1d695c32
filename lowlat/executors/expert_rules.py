"""Rules for a mixture of experts: the norm with the choice and a product, the other product with the sum and a norm.

The router leaves logits in a workspace; both products choose by them, so nobody waits for who chooses.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors.lowering import Covered, Lowering, Rule, unsupported
from lowlat.executors.orders import experts_name
from lowlat.executors.product_rules import Parts, normed_linear, norms_rows
from lowlat.kernels.experts_choice import Choice
from lowlat.kernels.experts_down import experts_down
from lowlat.kernels.experts_gate_up import experts_gate_up
from lowlat.kernels.experts_sum import experts_sum
from lowlat.kernels.norm import rms_norm
from lowlat.kernels.router import router

__all__ = ["EXPERT_RULES"]

PARTIALS = "experts.partials"  # what each of a row's experts adds to it
LOGITS = "router.logits"


def _rms_norm(lowering: Lowering, start: int) -> Covered:
    """A norm, with the choice of experts that reads it and the product behind that, or another product."""
    ops = lowering.program.ops
    arguments, following = lowering.arguments(start), lowering.following(start)
    norm_weight = lowering.weights.vector(ops[start].weights["weight"])
    if following is None or following.kind != "router":
        return normed_linear(lowering, start) or Covered(1, rms_norm(**arguments, weight=norm_weight))
    place = start + 1
    routed, choice = lowering.arguments(place), _choice(lowering, place)
    if routed["x"] is not arguments["out"] or choice.row_live is not arguments.get("row_live"):
        raise ConfigError(f"{lowering.program.name}: {following} does not read the norm before it, nor its rows")
    product = lowering.following(place)
    if product is None or product.kind != "experts_gate_up":
        return unsupported(lowering, place)
    reads = lowering.arguments(place + 1)
    if reads["x"] is not arguments["out"] or reads["expert_ids"] is not routed["expert_ids"]:
        raise ConfigError(f"{lowering.program.name}: {product} does not read the norm and the choice before it")
    calls = router(
        arguments["x"],
        norm_weight,
        row_live=choice.row_live,
        normed=arguments["out"],
        logits=choice.logits,
        eps=arguments["eps"],
        **lowering.vectors(place),
        card=lowering.card,
    )
    name = experts_name(product)
    calls += experts_gate_up(
        **reads,
        weight=lowering.weights.experts(name),
        bias=lowering.weights.experts_bias(name),
        choice=choice,
        expert_weights=routed["expert_weights"],
        card=lowering.card,
    )
    return Covered(3, calls)


def _choice(lowering: Lowering, place: int) -> Choice:
    """What the rows of a router choose by; the same for all who ask."""
    arguments, op = lowering.arguments(place), lowering.program.ops[place]
    shape = (arguments["x"].shape[0], lowering.weights.vector(op.weights["bias"]).shape[0])
    return Choice(lowering.workspace(LOGITS, shape, torch.float32), arguments.get("row_live"))


def _experts_down(lowering: Lowering, start: int) -> Covered:
    """The second product, the weighed sum into the residual stream, and the norm that follows it.

    Its kernel reads what rows choose by before it waits, so that must be older than the first product: that one lets
    later kernels start only when all before it has ended.
    """
    ops = lowering.program.ops
    op, following = ops[start], lowering.following(start)
    product = op.writes["out"]
    behind = start > 1 and lowering.kinds(start - 2, "router", "experts_gate_up")
    if not behind or following is None or following.kind != "add":
        return unsupported(lowering, start)
    if following.reads["b"] != product or not lowering.dies(product, start + 1):
        raise ConfigError(f"{lowering.program.name}: {product} is read by others than the sum after it")
    name, arguments, total = experts_name(op), lowering.arguments(start), lowering.arguments(start + 1)
    routed = ops[start - 2].writes
    if any(op.reads[each] != routed[each] for each in ("expert_ids", "expert_weights")):
        raise ConfigError(f"{lowering.program.name}: {op} does not read the choice before it")
    activated = arguments["activated"]
    partials = lowering.workspace(PARTIALS, (*activated.shape[:2], arguments["out"].shape[1]), torch.float32)
    calls = experts_down(
        activated=activated,
        choice=_choice(lowering, start - 2),
        weight=lowering.weights.experts(name),
        bias=lowering.weights.vector(op.weights["bias"]),
        out=partials,
        card=lowering.card,
    )
    norm: dict[str, Any] = {}
    count = 2
    after = lowering.following(start + 1)
    if after is not None and after.kind == "rms_norm" and after.reads["x"] == following.writes["out"]:
        parts = Parts(total["a"], partials, total["out"])
        if after.stage is op.stage and (product_too := normed_linear(lowering, start + 2, parts)):
            return Covered(2 + product_too.count, [*calls, *product_too.calls], [product, *product_too.hidden])
        if not norms_rows(lowering, start + 2):
            normed = lowering.arguments(start + 2)
            norm = {"norm_weight": lowering.weights.vector(after.weights["weight"]), "row_live": normed.get("row_live")}
            norm |= {"out": normed["out"], "eps": normed["eps"]}
            count = 3
    calls += experts_sum(
        residual=total["a"],
        partials=partials,
        total=total["out"],
        early=True,
        **norm,
    )
    return Covered(count, calls, [product])


EXPERT_RULES: Mapping[str, Rule] = MappingProxyType(
    {"experts_down": _experts_down, "experts_gate_up": unsupported, "rms_norm": _rms_norm}
)
