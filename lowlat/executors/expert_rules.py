"""Rules for a mixture of experts: the norm with the choice, the two products, and the sum with the next norm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors.lowering import Covered, Lowering, Rule
from lowlat.executors.orders import experts_name
from lowlat.executors.product_rules import Parts, normed_linear
from lowlat.kernels.experts_down import experts_down
from lowlat.kernels.experts_gate_up import experts_gate_up
from lowlat.kernels.experts_sum import experts_sum
from lowlat.kernels.norm import rms_norm
from lowlat.kernels.router import router

__all__ = ["EXPERT_RULES", "PARTIALS"]

AHEAD_BYTES = 32 << 20  # half of an H200's L2
PARTIALS = "experts.partials"  # what each of a row's experts adds to it


def _rms_norm(lowering: Lowering, start: int) -> Covered:
    """A norm, with the choice of experts or the product that reads it."""
    ops = lowering.program.ops
    arguments, following = lowering.arguments(start), lowering.following(start)
    norm_weight = lowering.weights.vector(ops[start].weights["weight"])
    if following is None or following.kind != "router":
        return normed_linear(lowering, start) or Covered(1, rms_norm(**arguments, weight=norm_weight))
    choice = lowering.arguments(start + 1)
    if choice.pop("x") is not arguments["out"] or choice.pop("row_live", None) is not arguments.get("row_live"):
        raise ConfigError(f"{lowering.program.name}: {following} does not read the norm before it, nor its rows")
    calls = router(
        arguments["x"],
        norm_weight,
        row_live=arguments.get("row_live"),
        normed=arguments["out"],
        eps=arguments["eps"],
        **choice,
        **lowering.vectors(start + 1),
        workspace=lowering.workspace,
        ahead=_next_weights(lowering, start + 1),
        card=lowering.card,
    )
    return Covered(2, calls)


def _next_weights(lowering: Lowering, start: int) -> torch.Tensor | None:
    """What the first product after a mixture reads, or as much of it as the L2 keeps while the experts stream."""
    for op in lowering.program.ops[start:]:
        if op.kind == "linear":
            tiles = lowering.weights.matrix(op.weights["weight"]).tiles.reshape(-1)
            return tiles[: AHEAD_BYTES // tiles.element_size()]
    return None


def _experts_gate_up(lowering: Lowering, start: int) -> Covered:
    name = experts_name(lowering.program.ops[start])
    calls = experts_gate_up(
        **lowering.arguments(start),
        weight=lowering.weights.experts(name),
        bias=lowering.weights.experts_bias(name),
        card=lowering.card,
    )
    return Covered(1, calls)


def _experts_down(lowering: Lowering, start: int) -> Covered:
    """The second product, the weighed sum into the residual stream, and the norm that follows it.

    Both kernels read the choice before they wait, so it must be older than the first product: that one lets later
    kernels start only when all before it has ended.
    """
    ops = lowering.program.ops
    op, following = ops[start], lowering.following(start)
    product = op.writes["out"]
    if start == 0 or ops[start - 1].kind != "experts_gate_up" or following is None or following.kind != "add":
        raise ConfigError(f"{lowering.program.name}: operation {op} stands where no kernel covers it")
    if following.reads["b"] != product or not lowering.dies(product, start + 1):
        raise ConfigError(f"{lowering.program.name}: {product} is read by others than the sum after it")
    name, arguments, total = experts_name(op), lowering.arguments(start), lowering.arguments(start + 1)
    ids, rows = arguments["expert_ids"], arguments["out"].shape[0]
    shape = (rows, ids.shape[1], arguments["out"].shape[1])
    partials = lowering.workspace(PARTIALS, shape, torch.float32)
    calls = experts_down(
        activated=arguments["activated"],
        expert_ids=ids,
        expert_weights=arguments["expert_weights"],
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
        if not _norms_for_itself(lowering, start + 2):
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


def _norms_for_itself(lowering: Lowering, norm: int) -> bool:
    """Whether the product behind a norm makes it, so that nothing else has to."""
    return normed_linear(lowering, norm) is not None


EXPERT_RULES: Mapping[str, Rule] = MappingProxyType(
    {"experts_down": _experts_down, "experts_gate_up": _experts_gate_up, "rms_norm": _rms_norm}
)
