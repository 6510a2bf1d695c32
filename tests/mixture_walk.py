"""A launch of a mixture of experts, walked thread by thread on a CPU."""

from typing import Any

from kernel_walk import Walker, walkable

from lowlat.kernels.moe.decode.mlp_plan import Pair
from lowlat.kernels.moe.decode.topk_routing import Choice
from lowlat.kernels.toolchain.kernel import Card

__all__ = ["FRAGMENTS", "NAMES", "small_card", "walk"]

SHARED = tuple(f"common.{part}" for part in ("handover", "norm_row", "norm_math", "sentinels", "activation"))
PARTS = (
    "expert_list",
    "mainloop",
    "copies",
    "gemm",
    "swiglu_epilogue",
    "weighing_epilogue",
    "topk_routing",
    "rank_sum",
)
FRAGMENTS = ("formats.bf16_fragment", "formats.mxfp4_fragment")
NAMES = (*SHARED, *FRAGMENTS, "moe.plan", *(f"moe.decode.{part}" for part in (*PARTS, "mlp_plan", "mlp")))


def small_card(blocks: int) -> Card:
    """One with so many multiprocessors."""
    return Card(blocks, 160 * 1024, (9, 0))


def walk(
    walker: Walker, arguments: dict[str, Any], choice: Choice, blocks: int, *, early: bool = False,
    plan: Pair | None = None,
) -> None:  # fmt: skip
    """All launches over the arguments' rows."""
    with walkable(walker, *NAMES) as modules:
        calls = modules[-1].experts_mlp(choice=choice, card=small_card(blocks), early=early, plan=plan, **arguments)
        for call in calls:
            walker.run(call)
