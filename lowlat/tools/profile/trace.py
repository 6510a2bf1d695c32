"""This module writes recorded steps as a trace for ui.perfetto.dev or chrome://tracing.

Slices of one track must not cross, and kernels overlap, so there are as many tracks of kernels as run at once. Stages
are drawn with their times from `times`, so that they neither overlap nor leave gaps.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lowlat.errors import ConfigError
from lowlat.graphs.program import OWN_NAMES, RangeNames, Stage
from lowlat.tools.profile.times import CallTime, StepTimes

__all__ = ["make_trace", "write_trace"]

PROCESS, STEPS, STAGES, KERNELS = 1, 1, 2, 3


def write_trace(path: Path, steps: Sequence[StepTimes], title: str, range_names: RangeNames = OWN_NAMES) -> None:
    """Write a JSON trace; `range_names` are of stages, see `Program`.

    Raises ConfigError where the file cannot be written.
    """
    try:
        path.write_text(json.dumps(make_trace(steps, title, range_names), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the trace cannot be written: {error}") from error


def make_trace(steps: Sequence[StepTimes], title: str, range_names: RangeNames = OWN_NAMES) -> dict[str, Any]:
    """Make the trace as JSON values; times count from the first kernel's start."""
    names_of = {stage: range_names.get(stage, str(stage)) for stage in Stage}
    clock = _Clock(min(call.event.start_us for call in steps[0].calls))
    lanes = _lanes([call for step in steps for call in step.calls])
    names = {STEPS: "steps", STAGES: "stages"}
    names |= {KERNELS + lane: "kernels" if lane == 0 else f"kernels that overlap, {lane}" for lane in set(lanes)}
    events = [_named("process_name", STEPS, title), *(_named("thread_name", *entry) for entry in sorted(names.items()))]
    events += [
        {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": track, "args": {"sort_index": track}}
        for track in sorted(names)
    ]
    lane = iter(lanes)
    for number, step in enumerate(steps):
        events.append(clock.slice(STEPS, f"step {number}", step.begin_us, step.end_us, {}))
        events += _stages(clock, step, number, names_of)
        for call in step.calls:
            arguments = {
                "stage": names_of[call.site.stage],
                "step": number,
                "counted_us": round(call.time_us, 3),
                "moved_bytes": round(call.site.moved_bytes),
            }
            track = KERNELS + next(lane)
            events.append(clock.slice(track, call.site.kernel, call.event.start_us, call.event.end_us, arguments))
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _stages(clock: "_Clock", step: StepTimes, number: int, names_of: RangeNames) -> Iterator[dict[str, Any]]:
    for stage, run in groupby(step.calls, key=lambda call: call.site.stage):
        calls = list(run)
        also = dict.fromkeys(names_of[other] for call in calls for other in call.site.also)
        arguments: dict[str, Any] = {"step": number, "num_launches": len(calls)}
        if also:
            arguments["covers_also"] = list(also)
        yield clock.slice(STAGES, names_of[stage], calls[0].begin_us, calls[-1].end_us, arguments)


class _Clock:
    """Whole nanoseconds since the start, so that what touches in time touches in the file."""

    def __init__(self, start_us: float) -> None:
        self._start_us = start_us

    def slice(self, track: int, name: str, begin_us: float, end_us: float, arguments: dict[str, Any]) -> dict[str, Any]:
        begin, end = (round((time - self._start_us) * 1e3) for time in (begin_us, end_us))
        return {
            "ph": "X",
            "name": name,
            "cat": {STEPS: "step", STAGES: "stage"}.get(track, "kernel"),
            "pid": PROCESS,
            "tid": track,
            "ts": begin / 1e3,
            "dur": (end - begin) / 1e3,
            "args": arguments,
        }


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}


def _lanes(calls: Sequence[CallTime]) -> list[int]:
    """Return for each call, in order of starts, the first track on which no earlier kernel still runs."""
    ends: list[float] = []
    lanes = []
    for call in calls:
        event = call.event
        lane = next((number for number, end in enumerate(ends) if end <= event.start_us), len(ends))
        if lane == len(ends):
            ends.append(event.end_us)
        ends[lane] = event.end_us
        lanes.append(lane)
    return lanes
