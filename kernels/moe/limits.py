"""The limits of kernels for MoE layers."""

from collections.abc import Mapping
from dataclasses import dataclass

from lowlat.kernels.common.limits import Asked, Excess, Limit, OnlyParam, Rule, Size
from lowlat.kernels.formats import FORMATS

__all__ = ["CHOSEN", "LIMITS", "MAX_CHOSEN", "MAX_EXPERTS", "MAX_ROUTED_WIDTH", "ROUTED", "ROUTED_WIDTH"]

MAX_EXPERTS, MAX_CHOSEN, MAX_ROUTED_WIDTH = 512, 10, 6144
ROUTED = Limit(most=MAX_EXPERTS)  # experts that are chosen from, next to which there may be a shared one
CHOSEN = Limit(most=MAX_CHOSEN)  # of them by a row
ROUTED_WIDTH = Limit(multiple=8, most=MAX_ROUTED_WIDTH)  # of rows that choose


def _chosen(asked: Asked) -> Excess | None:
    shared = int(bool(asked.params.get("shared")))
    experts, chosen = asked.sizes.get("E"), asked.sizes["k"] - shared
    if experts is not None and not ROUTED.takes(experts - shared):
        return Excess("num_experts", str(ROUTED), experts - shared)
    return None if CHOSEN.takes(chosen) else Excess("num_experts_per_tok", str(CHOSEN), chosen)


@dataclass(frozen=True)
class _Columns:
    """The rule that rows of experts' matrices are whole blocks of their format; see `Size`."""

    symbol: str
    name: str

    def __call__(self, asked: Asked) -> Excess | None:
        size = asked.sizes[self.symbol]
        for each in FORMATS.values():
            if asked.weights - {"bias"} == set(each.parts) and size % each.block:
                return Excess(self.name, f"a multiple of {each.block} for {each.name.upper()}", size)
        return None


LIMITS: Mapping[str, tuple[Rule, ...]] = {
    "experts_down": (_Columns("I", "moe_intermediate_size"),),
    "experts_gate_up": (
        _Columns("N", "hidden_size"),
        Size("I", Limit(multiple=8), "moe_intermediate_size"),
        OnlyParam("activation", ("silu", "gelu_tanh")),
    ),
    "narrow_linear": (Size("K", ROUTED_WIDTH, "hidden_size"),),  # by the router's kernel
    "router": (_chosen, Size("N", ROUTED_WIDTH, "hidden_size")),
}
