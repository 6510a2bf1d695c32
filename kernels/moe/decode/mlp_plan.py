"""This module plans both GEMMs of an MoE layer, which share the blocks of one launch."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.common.pipeline import BARRIER_BYTES
from lowlat.kernels.moe.plan import (
    MAX_COLUMNS,
    MOST_PART,
    MOST_TOGETHER,
    ExpertPlan,
    ExpertShape,
    facts_of,
    near_cuts,
    plan_experts,
    stages_wanted,
)
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.table import Knobs, Planned, choose_plan

__all__ = ["MlpPlan", "choose_mlp_plan", "mlp_plans", "plan_mlp"]

KIND = "experts_mlp"


@dataclass(frozen=True)
class MlpPlan:
    """Shapes and plans of both GEMMs, which share a block's threads, lists and pipelines.

    overlaps  weights of the second GEMM are prefetched while the last tiles of the first are multiplied
    """

    up: ExpertShape
    down: ExpertShape
    up_plan: ExpertPlan
    down_plan: ExpertPlan
    overlaps: bool

    @property
    def knobs(self) -> Knobs:
        """The numbers that a table may choose; `part` is that of the GEMM with the longer parts."""
        part = max(self.up_plan.part, self.down_plan.part)
        return {
            "stages": self.up_plan.stages, "part": part, "columns": self.up_plan.columns, "overlaps": self.overlaps,
        }  # fmt: skip

    @property
    def warps(self) -> int:
        """Warps that multiply in at least one of the GEMMs."""
        return max(self.up_plan.warps, self.down_plan.warps)

    @property
    def whole(self) -> ExpertPlan:
        """The plan of the lists and the block's threads, which both GEMMs share."""
        return replace(self.up_plan, warps=self.warps)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a warp's stage, enough for a part of either GEMM."""
        return max(self.up_plan.stage_bytes(self.up), self.down_plan.stage_bytes(self.down))

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        """Offsets in bytes of both GEMMs' areas, the lists, the barriers, and the end of all."""
        stages = self.up_plan.stages
        first = self.warps * stages * self.stage_bytes
        second = first + stages * self.up_plan.area_bytes
        lists = second + stages * self.down_plan.area_bytes
        barriers = lists + self.whole.list_bytes
        return first, second, lists, barriers, barriers + 2 * stages * BARRIER_BYTES


def plan_mlp(
    rows: int,
    up: ExpertShape,
    down: ExpertShape,
    gpu: Gpu,
    *,
    warps: int | None = None,
    stages: int | None = None,
    part: int = MOST_PART,
    columns: int = MAX_COLUMNS,
    overlaps: int | None = None,
) -> MlpPlan:
    """Derive the plans of both GEMMs for M rows, as `plan_experts` does, within one block's memory.

    warps, stages, part, columns  as in `plan_experts`, for both GEMMs
    overlaps                      0 or 1; None: for more than one row
    Raises ShapeError as `plan_experts` does.
    """
    cut: dict[str, Any] = {"warps": warps, "stages": stages, "part": part, "columns": columns}
    plan = _fit_mlp(rows, up, down, gpu, cut, overlaps)
    if stages is None:
        wanted = max(stages_wanted(each, warps, part) for each in (up, down))
        for depth in range(wanted, plan.up_plan.stages, -1):
            with suppress(ShapeError):
                deeper = _fit_mlp(rows, up, down, gpu, {**cut, "stages": depth}, overlaps)
                if (deeper.up_plan.part, deeper.down_plan.part) == (plan.up_plan.part, plan.down_plan.part):
                    return deeper
    return plan


def _fit_mlp(
    rows: int, up: ExpertShape, down: ExpertShape, gpu: Gpu, cut: dict[str, Any], overlaps: int | None
) -> MlpPlan:
    """Return the plans of both GEMMs with these numbers of `plan_experts`, if both fit a block."""
    available, together = gpu.shared_bytes, MOST_TOGETHER
    while True:
        try:
            left = replace(gpu, shared_bytes=available)
            first, second = (plan_experts(rows, each, left, together=together, **cut) for each in (up, down))
        except ShapeError as error:
            if available == gpu.shared_bytes:
                raise
            raise ShapeError(
                f"both GEMMs of experts for {rows} rows do not fit the {gpu.shared_bytes} bytes of shared memory "
                "that a block may have"
            ) from error
        common: dict[str, Any] = {
            "finishing": max(first.finishing, second.finishing),
            "num_blocks": max(first.num_blocks, second.num_blocks),
            "stages": min(first.stages, second.stages),
            "together": min(first.together, second.together),
        }
        # a single row's weights are so few that those of the second GEMM would only delay the last of the first
        ahead = rows > 1 if overlaps is None else bool(overlaps)
        plan = MlpPlan(up, down, replace(first, **common), replace(second, **common), ahead)
        excess = plan.places[-1] - gpu.shared_bytes
        if excess <= 0:
            return plan
        if together > 1:  # what the sums of more tiles take is not taken from the copies
            together = 1
        else:
            available -= excess


@cache
def mlp_plans(rows: int, up: ExpertShape, down: ExpertShape, gpu: Gpu) -> tuple[MlpPlan, ...]:
    """List the plans for M rows that fit a GPU, the derived one first. Raises ShapeError as `plan_mlp` does."""
    derived = plan_mlp(rows, up, down, gpu)
    usual = {name: int(value) for name, value in derived.knobs.items() if name != "overlaps"}
    cuts: list[dict[str, Any]] = [{**usual, "overlaps": not derived.overlaps}]
    cuts += [{**cut, "overlaps": derived.overlaps} for cut in near_cuts(**usual)]
    plans = [derived]
    for cut in cuts:
        with suppress(ShapeError):
            plans.append(plan_mlp(rows, up, down, gpu, **cut))
    return tuple({tuple(plan.knobs.values()): plan for plan in reversed(plans)}.values())[::-1]


def choose_mlp_plan(
    rows: int, up: ExpertShape, down: ExpertShape, gpu: Gpu, num_experts: int, gpus: int = 1
) -> tuple[MlpPlan, Planned]:
    """Choose the plan for M rows by a GPU's table, or the derived one; also return its place in tables.

    gpus  GPUs that add up their sums; each has a shard of every expert
    """
    facts = {**facts_of(rows, up, num_experts), "down": down.rows, "down_format": down.format.name}
    if gpus > 1:
        facts["gpus"] = gpus
    return choose_plan(gpu.tuning, KIND, facts, mlp_plans(rows, up, down, gpu))
