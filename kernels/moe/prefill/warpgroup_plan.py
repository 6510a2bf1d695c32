"""This module plans grouped GEMMs by warpgroups: when they are faster, their stages, and rows in order of experts.

Three warpgroups multiply 192 weight rows of an expert by up to 192 of its pairs, which are contiguous; an expert's
pairs begin at a multiple of eight places. Four more warps copy. No bit depends on the plan.
"""

from dataclasses import dataclass

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.pipeline import BARRIER_BYTES
from lowlat.kernels.gemm.prefill.activation_layout import STEP, arranged_shape
from lowlat.kernels.gemm.prefill.plan import ALIGNMENT, STEP_ROW_BYTES, has_prefill_gemm
from lowlat.kernels.moe.plan import ExpertShape
from lowlat.kernels.toolchain.kernel import Gpu, WorkspaceShape

__all__ = [
    "COPYING",
    "COPYING_REGISTERS",
    "MOST_PAIRS",
    "MULTIPLYING_REGISTERS",
    "RUN",
    "SIZES",
    "WARPS",
    "WarpgroupPlan",
    "fits_warpgroups",
    "num_places",
    "plan_warpgroups",
    "takes_warpgroups",
    "warpgroup_workspaces",
]

GROUPS = 3  # warpgroups, each with 64 weight rows
WARPS = 4 * GROUPS  # each with a tile of 16
COPYING = 4  # warps that copy, each the weights of three that multiply
COPYING_REGISTERS, MULTIPLYING_REGISTERS = 32, 160  # a thread, then: of 128 that all begin with
SIZES = (32, 64, 96, 112, 128, 144, 160, 192)  # pairs that are multiplied at once: as many as a tile has, or a few more
MOST_PAIRS = SIZES[-1]
RUN = 8  # places of which an expert's are a multiple; a thread has two of so many pairs
MOST_STAGES, LEAST_STAGES = 7, 3
# Pairs an expert, on average, from which these GEMMs are taken: below, the experts' bytes decide, and small tiles in
# more blocks read them faster.
LEAST_PAIRS = 48


@dataclass(frozen=True)
class WarpgroupPlan:
    """The stages of a GEMM, which change no bit of the result.

    stages      steps of 64 columns, under way or multiplied
    step_bytes  of a step of one tile of weights: words, and scales after them
    """

    stages: int
    step_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (WARPS + COPYING)

    @property
    def pair_bytes(self) -> int:
        """Bytes of a stage's rows of pairs, after which its weights are."""
        return MOST_PAIRS * STEP_ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """Rows of pairs and weights of one step; the next stage's begin at a multiple of 1024."""
        return -(-(self.pair_bytes + WARPS * self.step_bytes) // ALIGNMENT) * ALIGNMENT

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return ALIGNMENT + self.stages * self.stage_bytes + self.stages * BARRIER_BYTES

    def row_blocks(self, shape: ExpertShape) -> int:
        """Blocks that share a tile of pairs, each with other weight rows."""
        return -(-shape.tiles // WARPS)


def plan_warpgroups(shape: ExpertShape, gpu: Gpu) -> WarpgroupPlan:
    """As many stages as fit. Raises ShapeError where too few do."""
    for stages in range(MOST_STAGES, LEAST_STAGES - 1, -1):
        plan = WarpgroupPlan(stages, shape.step_bytes + shape.scale_bytes)
        if plan.shared_bytes <= gpu.shared_bytes:
            return plan
    raise ShapeError(f"a grouped GEMM by warpgroups does not fit the {gpu.shared_bytes} bytes of shared memory")


def fits_warpgroups(hidden: int, inner: int, num_pairs: int, num_experts: int) -> bool:
    """Whether an MoE layer's sizes are those of these GEMMs, and its pairs enough that they pay."""
    return hidden % STEP == 0 and inner % STEP == 0 and num_pairs >= LEAST_PAIRS * num_experts


def takes_warpgroups(hidden: int, inner: int, num_pairs: int, num_experts: int, gpu: Gpu) -> bool:
    """Whether a GPU multiplies an MoE layer's pairs by warpgroups: it has the instructions, and `fits_warpgroups`."""
    return has_prefill_gemm(gpu) and fits_warpgroups(hidden, inner, num_pairs, num_experts)


def num_places(num_pairs: int, num_experts: int) -> int:
    """Rows that pairs in order of experts take: an expert e whose first is pair p begins at place 8 (p // 8 + e)."""
    return (-(-num_pairs // RUN) + num_experts) * RUN


def warpgroup_workspaces(
    rows: int, top_k: int, num_experts: int, hidden: int, inner: int
) -> tuple[WorkspaceShape, WorkspaceShape, WorkspaceShape]:
    """The workspaces next to the lists: each pair's place, activations arranged, and outputs by place.

    The inputs, arranged, take the memory of the outputs, which are wider.
    """
    places = num_places(rows * top_k, num_experts)
    return (
        ("experts.places", (rows * top_k,), torch.int32),
        ("experts.arranged", arranged_shape(places, inner), torch.bfloat16),
        ("experts.partials", (places, hidden), torch.float32),
    )
