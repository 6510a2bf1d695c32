"""The benchmark of first tokens, tried on a tiny model without a card."""

import json
from pathlib import Path

import pytest
from benches import bench

first_token = bench("first_token")


@pytest.mark.second
def test_a_row_for_each_prompt_depth_and_way(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    given = ["--directory", tmp_path, "--tiny", "--device", "cpu", "--prompt", 5, 140, "--runs", 2, "--out", out]
    first_token.main([*map(str, given), "--commit", "c0ffee1"])
    found = json.loads(out.read_text())
    assert found["weights"] == "random" and found["commit"] == "c0ffee1"
    cases = [(row["num_speculative_tokens"], row["through"], row["prompt"]) for row in found["rows"]]
    assert cases == [(depth, way, length) for depth in (0, 3) for way in ("process", "socket") for length in (5, 140)]
    assert all(0 < row["ms_least"] <= row["ms_p50"] <= row["ms_p99"] for row in found["rows"])
    assert all(row["next_ms_p50"] > 0 and row["runs"] == 2 for row in found["rows"])
