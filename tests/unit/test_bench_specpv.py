"""The benchmark of SpecPV: what its rows say of agreement and of time."""

import json
from pathlib import Path

import pytest
from benches import bench

specpv = bench("specpv")


def test_agreement_is_by_place() -> None:
    found = specpv._agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert found == {"agreement": 0.875, "diverged_at": [2, None]}


@pytest.mark.second
def test_rows_stand_beside_full_attention(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sizes = ["--context", "256", "--tokens", "36", "--retrieval", "1", "--refresh", "3", "--threshold", "0"]
    assert specpv.main(["--model", "bundled", "--device", "cpu", "--out", str(out), *sizes]) == 0
    full, partial = json.loads(out.read_text())
    assert (full["attention"], full["lossy"], full["agreement"], full["tokens_per_s_of_full"]) == ("full", False, 1, 1)
    assert (partial["attention"], partial["lossy"], partial["simulated"]) == ("partial", True, False)
    assert partial["refreshes"] >= 2 and partial["partial_steps"] > 3 and partial["gigabytes_of_full"] < 1
    assert partial["ms_p50"] > 0 and partial["tokens_per_s"] > 0


@pytest.mark.second
def test_acceptance_stands_by_position(tmp_path: Path) -> None:
    out = tmp_path / "positions.json"
    sizes = ["--positions", "60,20", "--requests", "1", "--tokens", "12", "--draft-window", "16", "--device", "cpu"]
    bench("positions").main([*sizes, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["position"] for row in rows] == [20, 60] and all(row["num_drafts"] > 0 for row in rows)
    assert all(1 <= row["mean_acceptance_length"] <= 4 and row["draft_window"] == 16 for row in rows)
