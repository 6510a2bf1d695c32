"""The benchmark of structured output, tried on the bundled pair without a card."""

import json
from pathlib import Path

import numpy as np
import pytest
from benches import bench

structured = bench("structured")


def test_a_stand_in_forces_runs_and_restricts_the_rest() -> None:
    state = structured.StandIn(100, [7, 64, 99], offers=True)
    masks = np.zeros((3, 4), dtype=np.int32)
    state.fill((5, 7, 64), (-1, 0, 1), masks)
    rows = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert [row.nonzero()[0].tolist() for row in rows] == [[7], [64], [99]]
    assert state.forced(2) == [7, 64] and not structured.StandIn(100, [7]).forced(2)
    state.advance((7, 64, 99))
    assert state.forced(2) == []
    state.fill((99,), (-1,), masks[:1])
    assert 90 < np.unpackbits(masks[:1].view(np.uint8)).sum() <= 128


@pytest.mark.second
def test_rows_of_steps_with_and_without_a_grammar(tmp_path: Path) -> None:
    given = ["--geometry", "none", "--context", "20", "--window", "20", "--steps", "4", "--depth", "3", "--batch", "1"]
    out = tmp_path / "structured.json"
    assert structured.main([*given, "--device", "cpu", "--out", str(out)]) == 0
    (subject,) = json.loads(out.read_text())["subjects"]
    (row,), (forced,) = subject["rows"], subject["forced"]
    for kind in ("plain", "grammar"):
        assert 0 < row[kind]["p50_us"] <= row[kind]["p99_us"] and row[kind]["steps"] >= 4
    assert row["mask_us"] > 20 and row["p50_over_plain"] == pytest.approx(
        row["grammar"]["p50_us"] / row["plain"]["p50_us"], abs=1e-4
    )
    assert forced["with"]["tokens_per_step"] > forced["without"]["tokens_per_step"]
