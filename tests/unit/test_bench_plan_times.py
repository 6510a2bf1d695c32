"""Derived plans held to measured times: those that lie in the repository, and made-up ones."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from benches import bench
from lowered import Pair
from lowering_cases import DEMO

from lowlat.errors import ConfigError, LowlatError
from lowlat.kernels.toolchain.kernel import H200
from lowlat.kernels.tuning.table import Entry, TuningTable
from lowlat.options.directories import tuning_directory, uses_tuning_tables
from lowlat.tools.tune.times import PlanTimes, TimedPlan, read_times

FILES = ("h200", "h100")
KEY = "rows=64 N=28672 K=4096 epilogue=silu normed=0 argmax=0"
MOST = {"decode_gemm": 1.10, "attention": 1.10, "prefill_gemm": 1.16}  # of one launch


@pytest.mark.parametrize("name", FILES)
def test_derived_plans_lie_within_a_tenth_of_the_fastest(name: str, repository: Path) -> None:
    judge, summary = bench("plan_times").judge, bench("plan_times").summary
    judged = judge(read_times(repository / "bench" / "results" / name / "plan_times.json"))
    for kind, most in MOST.items():
        found = summary([each for each in judged if each.kind == kind])
        assert found["median"] < 1.01 and found["total"] < 1.02, (kind, found)
        assert found["most"] < most and found["timed"] > 0.85 * found["launches"], (kind, found)
        assert found["beyond_limit"] < 0.03 * found["launches"], (kind, found)


def made_up(launches: dict[str, dict[str, tuple[TimedPlan, ...]]]) -> PlanTimes:
    return PlanTimes(
        gpu="A GPU", capability=H200.capability, num_multiprocessors=132, shared_bytes=H200.shared_bytes,
        peak_gb_s=4800.0, driver="", commit="abc", source="made up", launches=launches,
    )  # fmt: skip


def test_a_slow_derived_plan_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_times = bench("plan_times")
    derived, other = (dict(plan.knobs) for plan in plan_times.plans_of_key("decode_gemm", KEY, made_up({}).facts)[:2])
    for us, code in ((10.4, 0), (13.0, 1)):
        times = made_up({"decode_gemm": {KEY: (TimedPlan(derived, us), TimedPlan(other, 10.0))}})
        times.write(tmp_path / "times.json")
        assert read_times(tmp_path / "times.json") == times
        assert plan_times.main([str(tmp_path / "times.json"), "--worst", "1"]) == code
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert shown[0]["most"] == us / 10 and shown[-1]["ratio"] == us / 10 and shown[-1]["key"] == KEY
        assert shown[0]["beyond_limit"] == code
    unknown = made_up({"decode_gemm": {KEY: (TimedPlan(other, 10.0),)}})
    assert plan_times.summary(plan_times.judge(unknown)) == {"launches": 1, "timed": 0}


def test_keys_of_other_kinds_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plans of 'experts_mlp' do not follow from a key"):
        bench("plan_times").plans_of_key("experts_mlp", "rows=1", H200)
    with pytest.raises(ConfigError, match="weights 'fp3' are not known"):
        bench("plan_times").plans_of_key("decode_gemm", f"{KEY} weights=fp3", H200)
    (tmp_path / "table.json").write_bytes(msgspec.json.encode({"format": 1}))
    with pytest.raises(ConfigError, match=r"no times of plans: .*`lowlat tune --times"):
        read_times(tmp_path / "table.json")


def test_launches_whose_plans_differ_are_named() -> None:
    derived_plans, pair = bench("derived_plans"), Pair(DEMO / "target", DEMO / "head")
    derived = pair.lower(3, 1).groups
    call = next(each for group in derived for each in group.kernel_calls if each.planned is not None)
    assert call.planned is not None
    entry = Entry(call.planned.candidates[1].knobs)
    table = TuningTable("A GPU", H200.capability, 132, H200.shared_bytes)
    table = replace(table, entries={call.planned.kind: {call.planned.key: entry}})
    tabled = pair.lower(3, 1, replace(H200, tuning=table)).groups
    found = derived_plans.differing(tabled, derived)
    (plan,) = found["plans"]
    assert found["tabled_launches"] == found["differing_launches"] == plan["count"] < found["cut_launches"]
    assert plan["launch"] == f"{call.planned.kind} {call.planned.key}" and plan["tabled"] != plan["derived"]
    assert derived_plans.differing(derived, derived)["plans"] == []
    with pytest.raises(LowlatError, match="is no derived twin of"):
        derived_plans.differing(tabled, tabled)
    rows = [{"ratio": ratio, "derived": {"ms_p50": ratio}, "tabled": {"ms_p50": 1.0}} for ratio in (1.0, 1.3)]
    assert derived_plans.summary(rows) == {"median_ratio": 1.15, "most_ratio": 1.3, "total_ratio": 1.15}


def test_tables_are_left_out_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWLAT_TUNING", str(tmp_path))
    with bench("derived_plans").tables(are_used=False):
        assert not uses_tuning_tables() and tuning_directory().name == "tuning"
    assert uses_tuning_tables() and tuning_directory() == tmp_path
    with pytest.raises(ConfigError, match="there is none"):
        bench("derived_plans").main(["--out", str(tmp_path / "none.json")])
