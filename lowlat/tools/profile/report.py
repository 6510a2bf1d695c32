"""This module summarises recorded steps by stage and by kernel, with the bytes that they must move.

All times are means over the recorded steps, so that stages add up to the step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from lowlat.graphs.program import OWN_NAMES, RangeNames, Stage
from lowlat.tools.profile.times import AllReduce, CallSite, CallTime, Idle, StepTimes, idle_time

__all__ = ["AllReduceRow", "KernelRow", "StageRow", "Summary", "summarise"]


@dataclass(frozen=True)
class StageRow:
    """One stage of a step, by the name of its range.

    time_us        time a step; None if another stage's kernels cover all of it
    share          share of the step's time
    num_launches   launches a step
    moved_bytes    bytes that its launches must read a step
    gb_per_s       those bytes over the time; None without bytes
    share_of_wall  that rate over the GPU's; None without bytes or without a wall
    within         the stage whose kernels cover it, if it has none of its own
    """

    stage: str
    time_us: float | None
    share: float | None
    num_launches: int
    moved_bytes: int
    gb_per_s: float | None
    share_of_wall: float | None
    within: str | None = None


@dataclass(frozen=True)
class KernelRow:
    """One kernel in one stage: all of its launches in a step.

    time_us      time a step: how far the launches moved the latest end, see `times`
    duration_us  time of one launch from its start to its end, with waits for others
    """

    stage: str
    kernel: str
    num_launches: int
    time_us: float
    duration_us: float
    share: float
    moved_bytes: int
    gb_per_s: float | None
    share_of_wall: float | None


@dataclass(frozen=True)
class AllReduceRow:
    """One rank's launches of a step that exchange with others, all stages together.

    num_launches, time_us, share     that do little else; waits for slower ranks are in their time
    num_fused, fused_us              that multiply, too, and exchange meanwhile: their whole time
    """

    num_launches: int
    time_us: float
    share: float
    num_fused: int
    fused_us: float


@dataclass(frozen=True)
class Summary:
    """All of a profile's figures.

    step_us, min_step_us, max_step_us  the recorded steps, from the first kernel's start to the last one's end
    kernels                            those that take most first
    all_reduce                         among ranks; None where there is one
    """

    num_steps: int
    step_us: float
    min_step_us: float
    max_step_us: float
    num_launches: int
    moved_bytes: int
    gb_per_s: float | None
    share_of_wall: float | None
    stages: tuple[StageRow, ...]
    kernels: tuple[KernelRow, ...]
    idle: Idle
    all_reduce: AllReduceRow | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the idle share next to the idle times; of one rank without `all_reduce`."""
        values = asdict(self)
        if self.all_reduce is None:
            del values["all_reduce"]
        values["stages"], values["kernels"] = list(values["stages"]), list(values["kernels"])
        values["idle"]["share"] = self.idle.share
        return values


def summarise(steps: Sequence[StepTimes], wall_gb_per_s: float | None, range_names: RangeNames = OWN_NAMES) -> Summary:
    """Summarise recorded steps, at least one.

    wall_gb_per_s  what the GPU's memory delivers
    range_names    of stages, see `Program`
    """
    sites = [call.site for call in steps[0].calls]
    times = [fmean(step.calls[place].time_us for step in steps) for place in range(len(sites))]
    lasted = [fmean(_duration(step.calls[place]) for step in steps) for place in range(len(sites))]
    total = fmean(step.time_us for step in steps)
    moved = sum(site.moved_bytes for site in sites)
    every = [step.time_us for step in steps]
    kernels: dict[tuple[Stage, str], list[int]] = {}
    for place, site in enumerate(sites):
        kernels.setdefault((site.stage, site.kernel), []).append(place)
    rows = []
    for (stage, name), places in kernels.items():
        time_us, mine = sum(times[place] for place in places), sum(sites[place].moved_bytes for place in places)
        rates = _rates(mine, time_us, wall_gb_per_s)
        duration = fmean(lasted[place] for place in places)
        share = _part(time_us, total)
        rows.append(
            KernelRow(
                range_names.get(stage, str(stage)), name, len(places), time_us, duration, share, round(mine), *rates
            )
        )
    return Summary(
        num_steps=len(steps),
        step_us=total,
        min_step_us=min(every),
        max_step_us=max(every),
        num_launches=len(sites),
        moved_bytes=round(moved),
        **dict(zip(("gb_per_s", "share_of_wall"), _rates(moved, total, wall_gb_per_s), strict=True)),
        stages=tuple(_stage_rows(sites, times, total, wall_gb_per_s, range_names)),
        kernels=tuple(sorted(rows, key=lambda row: -row.time_us)),
        idle=idle_time(steps),
        all_reduce=_all_reduce_row(sites, times, total),
    )


def _all_reduce_row(sites: Sequence[CallSite], times: Sequence[float], total: float) -> AllReduceRow | None:
    """The launches that exchange; None where none does."""
    found = {
        kind: [time for site, time in zip(sites, times, strict=True) if site.all_reduce is kind] for kind in AllReduce
    }
    alone, fused = found[AllReduce.ALONE], found[AllReduce.FUSED]
    if not alone and not fused:
        return None
    return AllReduceRow(len(alone), sum(alone), _part(sum(alone), total), len(fused), sum(fused))


def _stage_rows(
    sites: Sequence[CallSite],
    times: Sequence[float],
    total: float,
    wall_gb_per_s: float | None,
    range_names: RangeNames,
) -> Iterable[StageRow]:
    """The stages in the step's order; one without launches of its own names the stage that covers it."""
    names = {stage: range_names.get(stage, str(stage)) for stage in Stage}
    for stage, name in names.items():
        places = [place for place, site in enumerate(sites) if site.stage is stage]
        if places:
            time_us, moved = sum(times[place] for place in places), sum(sites[place].moved_bytes for place in places)
            rates = _rates(moved, time_us, wall_gb_per_s)
            yield StageRow(name, time_us, _part(time_us, total), len(places), round(moved), *rates)
            continue
        within = next((names[site.stage] for site in sites if stage in site.also), None)
        if within is not None:
            yield StageRow(name, None, None, 0, 0, None, None, within)


def _duration(call: CallTime) -> float:
    return call.event.end_us - call.event.start_us


def _part(time_us: float, total_us: float) -> float:
    return time_us / total_us if total_us else 0.0


def _rates(moved_bytes: float, time_us: float, wall_gb_per_s: float | None) -> tuple[float | None, float | None]:
    """GB/s and its share of the wall."""
    if not moved_bytes or not time_us:
        return None, None
    rate = moved_bytes / time_us / 1e3
    return rate, rate / wall_gb_per_s if wall_gb_per_s else None
