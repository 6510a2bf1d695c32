"""Attribution of overlapping kernels to launches, sums over stages, and traces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowlat.errors import ConfigError, LowlatError
from lowlat.graphs.program import Stage
from lowlat.tools.profile.report import summarise
from lowlat.tools.profile.times import CallSite, KernelEvent, StepTimes, attribute, idle_time
from lowlat.tools.profile.trace import make_trace, write_trace

BASE, ACCEPT, COMMIT, PUBLISH = (*(Stage.VERIFY, Stage.ACCEPT), *(Stage.COMMIT, Stage.PUBLISH))
SITES = (
    CallSite(BASE, "product_a", "product", 4000.0),
    CallSite(BASE, "product_b", "product", 2000.0),
    CallSite(ACCEPT, "accept", "accept", also=(COMMIT,)),
    CallSite(PUBLISH, "publish", "publish"),
)


def events_of(*spans: tuple[float, float]) -> list[KernelEvent]:
    """Kernels of SITES in turn, by start and end."""
    return [
        KernelEvent(f"lowlat::kernels::{SITES[place % 4].source}", start, end)
        for place, (start, end) in enumerate(spans)
    ]


# two steps: a dependent kernel starts inside the one before, one ends before an earlier one, two gaps
SPANS = ((100, 110), (104, 108), (105, 130), (132, 135), (150, 160), (155, 190), (160, 200), (200, 201))


def times_of(step: StepTimes) -> list[float]:
    return [call.time_us for call in step.calls]


def test_a_call_takes_what_it_adds_to_the_latest_end() -> None:
    first, second = attribute(events_of(*SPANS), SITES)
    assert times_of(first) == [10, 0, 20, 5]
    assert times_of(second) == [10, 30, 10, 1]
    assert (first.begin_us, first.end_us, first.time_us) == (100, 135, 35)
    assert (second.begin_us, second.end_us, second.time_us) == (150, 201, 51)
    assert [call.site for call in first.calls] == list(SITES)


def test_order_of_the_recording_does_not_matter_and_first_steps_are_left_out() -> None:
    events = events_of(*SPANS)
    assert attribute(events[::-1], SITES, skip=1) == attribute(events, SITES)[1:]
    with pytest.raises(LowlatError, match="recorded 2 steps, of which the first 2 do not count"):
        attribute(events, SITES, skip=2)


def test_a_step_that_starts_inside_the_one_before_takes_only_what_it_adds() -> None:
    spans = [*SPANS[:3], (132, 140), (138, 145), *SPANS[5:]]
    _, second = attribute(events_of(*spans), SITES)
    assert second.begin_us == 140
    assert times_of(second)[0] == 5


@pytest.mark.parametrize("count", [0, 1, 7])
def test_what_is_not_whole_steps_is_refused(count: int) -> None:
    with pytest.raises(LowlatError, match=f"recorded {count} kernels, which are not whole steps of 4 launches"):
        attribute(events_of(*SPANS)[:count], SITES)
    with pytest.raises(LowlatError, match="not whole steps of 0 launches"):
        attribute(events_of(*SPANS), ())


def test_a_kernel_in_another_s_place_is_refused() -> None:
    events = events_of(*SPANS)
    events[2] = KernelEvent("lowlat::kernels::embed", 105, 130)
    with pytest.raises(LowlatError, match="kernel number 2 of a step is lowlat::kernels::embed, where accept"):
        attribute(events, SITES)


def test_idle_time_is_where_no_kernel_runs() -> None:
    idle = idle_time(attribute(events_of(*SPANS), SITES))
    assert (idle.span_us, idle.idle_us, idle.between_us) == (101, 2 + 15, 15)
    assert idle.share == pytest.approx(17 / 101)
    packed = idle_time(attribute(events_of((0, 10), (10, 11), (10, 20), (15, 30)), SITES))
    assert (packed.span_us, packed.idle_us, packed.share) == (30, 0, 0)


def test_summary_adds_up_and_keeps_the_order_of_stages() -> None:
    summary = summarise(attribute(events_of(*SPANS), SITES), wall_gb_per_s=0.5)
    assert [row.stage for row in summary.stages] == [BASE, ACCEPT, COMMIT, PUBLISH]
    assert [row.time_us for row in summary.stages] == [25, 15, None, 3]
    assert [row.num_launches for row in summary.stages] == [2, 1, 0, 1]
    assert [row.within for row in summary.stages] == [None, None, ACCEPT, None]
    assert sum(row.time_us or 0 for row in summary.stages) == summary.step_us == 43
    assert sum(row.share or 0 for row in summary.stages) == pytest.approx(1)
    assert (summary.min_step_us, summary.max_step_us, summary.num_steps, summary.num_launches) == (35, 51, 2, 4)
    base = summary.stages[0]
    assert base.moved_bytes == summary.moved_bytes == 6000
    assert base.gb_per_s == pytest.approx(6000 / 25e-6 / 1e9)
    assert base.share_of_wall == pytest.approx(0.24 / 0.5)
    assert summary.share_of_wall == pytest.approx(6000 / 43e-6 / 1e9 / 0.5)
    assert summary.stages[1].gb_per_s is None


def test_kernels_come_by_what_they_take_with_their_own_durations() -> None:
    summary = summarise(attribute(events_of(*SPANS), SITES), wall_gb_per_s=None)
    assert [(row.kernel, row.time_us) for row in summary.kernels] == [
        *(("product_b", 15), ("accept", 15), ("product_a", 10), ("publish", 3))
    ]
    assert summary.kernels[0].duration_us == (4 + 35) / 2
    assert all(row.share_of_wall is None for row in summary.kernels)
    assert all(row.share_of_wall is None for row in summary.stages)
    values = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert values["idle"]["share"] == pytest.approx(17 / 101)
    assert values["stages"][2]["within"] == "ACCEPT"


def slices(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """A trace's slices by the name of their track."""
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def test_trace_has_tracks_of_steps_stages_and_kernels(tmp_path: Path) -> None:
    steps = attribute(events_of(*SPANS), SITES)
    path = tmp_path / "trace.json"
    write_trace(path, steps, "a title")
    tracks = slices(json.loads(path.read_text()))
    assert [(each["name"], each["ts"], each["dur"]) for each in tracks["steps"]] == [
        ("step 0", 0.0, 35.0),
        ("step 1", 50.0, 51.0),
    ]
    stages = [(each["name"], each["ts"], each["dur"]) for each in tracks["stages"]]
    assert stages[:3] == [(str(BASE), 0.0, 10.0), (str(ACCEPT), 10.0, 20.0), (str(PUBLISH), 30.0, 5.0)]
    assert tracks["stages"][1]["args"]["covers_also"] == ["COMMIT"]
    kernels = [each for name, track in tracks.items() if name.startswith("kernels") for each in track]
    assert sorted((each["ts"], each["dur"]) for each in kernels) == sorted((s - 100.0, float(e - s)) for s, e in SPANS)
    assert {each["args"]["stage"] for each in kernels} == {str(BASE), str(ACCEPT), str(PUBLISH)}


def test_slices_of_a_track_never_cross() -> None:
    generator = torch.Generator().manual_seed(3)
    starts = (torch.rand(400, generator=generator) * 3 + 0.001).cumsum(0).tolist()
    lasts = (torch.rand(400, generator=generator) * 9).tolist()
    spans = [(start, start + last) for start, last in zip(starts, lasts, strict=True)]
    tracks = slices(make_trace(attribute(events_of(*spans), SITES), ""))
    assert len(tracks) > 4
    for name, track in tracks.items():
        ends = [round(1e3 * (each["ts"] + each["dur"])) for each in track]
        begins = [round(1e3 * each["ts"]) for each in track]
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)), name


def test_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the trace cannot be written"):
        write_trace(tmp_path / "no" / "trace.json", attribute(events_of(*SPANS), SITES), "")
