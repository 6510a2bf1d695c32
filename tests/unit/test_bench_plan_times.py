"""Derived plans held to measured times: those that lie in the repository, and made-up ones."""

import json
from pathlib import Path

import msgspec
import pytest
from benches import bench

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain.kernel import H200
from lowlat.kernels.tuning.table import SHIPPED, read_table
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


def test_derived_plans_of_shared_rows_are_cut_as_the_fastest() -> None:
    """In weight tiles of a block and steps of a stage, of every launch of 64 and 128 rows that was timed on an H200."""
    plans_of_key, entries = bench("plan_times").plans_of_key, read_table(SHIPPED / "nvidia-h200.json").entries
    timed = {key: entry for key, entry in entries["decode_gemm"].items() if key.startswith("shared_rows=")}
    assert len(timed) >= 14
    for key, entry in timed.items():
        plans = plans_of_key("decode_gemm", key, H200)
        assert any(dict(plan.knobs) == dict(entry.knobs) for plan in plans), key
        derived = plans[0].knobs
        assert (derived["weight_tiles"], derived.get("span", 1)) == (
            entry.knobs["weight_tiles"], entry.knobs.get("span", 1),
        ), key  # fmt: skip


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
