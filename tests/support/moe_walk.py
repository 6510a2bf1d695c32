"""A launch of a mixture of experts, walked thread by thread on a CPU."""

from typing import Any

from kernel_walk import Walker, walkable

from lowlat.kernels.moe.decode.mlp_plan import MlpPlan
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.toolchain.kernel import Gpu

NAMES = ("moe.decode.mlp",)
ALONE = "moe.decode.experts"  # each GEMM in a launch of its own


def small_gpu(blocks: int) -> Gpu:
    """One with so many SMs."""
    return Gpu(blocks, 160 * 1024, (9, 0))


def walk(
    walker: Walker, arguments: dict[str, Any], routing: TopKRouting, blocks: int, *, early: bool = False,
    plan: MlpPlan | None = None,
) -> None:  # fmt: skip
    """All launches over the arguments' rows."""
    with walkable(walker, *NAMES) as modules:
        calls = modules[-1].experts_mlp(routing=routing, gpu=small_gpu(blocks), early=early, plan=plan, **arguments)
        for call in calls:
            walker.run(call)
