"""`lowlat profile` on a GPU: the bundled pair's steps, replayed and launched one by one; a batch without a head."""

import json
from pathlib import Path

import pytest
from cli_calls import answer, lowlat
from needed_gpus import need_gpus

from lowlat.cli.options import bundled
from lowlat.graphs.program import Stage
from lowlat.speculators.eagle3.speculator import RANGE_NAMES

STEPS = 5
# the bundled pair's draft model is EAGLE3's, whose ranges have names of their own
STAGES = [RANGE_NAMES.get(stage, str(stage)) for stage in Stage if stage not in (Stage.PREFILL, Stage.DRAFT)]


@pytest.mark.parametrize("executor", ["graph", "eager"])
def test_every_stage_has_its_time_and_all_add_up(executor: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = answer("profile", "--steps", STEPS, "--executor", executor, "--trace", path, "--json")
    assert [row["stage"] for row in found["stages"]] == STAGES
    own = [row for row in found["stages"] if row["within"] is None]
    assert all(row["time_us"] > 0 and row["num_launches"] > 0 for row in own)
    assert sum(row["time_us"] for row in own) == pytest.approx(found["step_us"], rel=0.03)
    assert found["min_step_us"] <= found["step_us"] <= found["max_step_us"]
    assert abs(found["num_steps"] - STEPS) <= 1
    assert 500 < found["wall_gb_per_s"] < 20_000
    assert 0 < found["share_of_wall"] < 3  # such small weights stay in the L2
    assert 0 <= found["idle"]["share"] < 1
    # the profiler costs something, the host's own work too: but a step lasts as long as its kernels, not ten times
    assert found["step_us"] / 10 < found["host_us"] < found["step_us"] * 50
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event["ph"] == "X" and event["cat"] == "kernel"]
    assert len(kernels) == found["num_steps"] * found["num_launches"]
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in kernels)
    stages = [event["name"] for event in events if event["ph"] == "X" and event["cat"] == "stage"]
    assert set(stages) == {row["stage"] for row in own}


def test_of_two_gpus_each_has_its_time_and_what_it_all_reduces() -> None:
    need_gpus(2)
    found = answer("profile", "--tensor-parallel", 2, "--steps", STEPS, "--json")
    all_reduce, (first, second) = found["all_reduce"], found["cards"]
    assert (first["device"], second["device"]) == ("cuda:0", "cuda:1")
    assert all_reduce["num_launches"] + all_reduce["num_fused"] > 16  # two a layer
    assert 0 < all_reduce["time_us"] < found["step_us"] == pytest.approx(first["step_us"])
    assert second["step_us"] == pytest.approx(first["step_us"], rel=0.5)


def test_tables_of_a_batch_without_a_head() -> None:
    shown = lowlat("profile", bundled("target"), "--steps", STEPS, "--batch", 3, "--context", 300)
    assert shown.exit_code == 0, shown.output
    assert "batch 3, 1 rows, S = 0" in shown.stdout
    assert "decode_gemm" in shown.stdout
    assert "EAGLE_DRAFT" not in shown.stdout
    assert "idle: no kernel ran for" in shown.stdout
