"""The benchmark of whole prompts, tried on a tiny model without a card."""

import json
from pathlib import Path

import pytest
from benches import bench

from lowlat.executors.reference import ReferenceExecutor

prompts = bench("prompts")


def test_a_row_for_each_prompt_and_number_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position is prefilled once, in as few calls as may be."""
    sizes, run = [], ReferenceExecutor.prefill

    def prefill(executor: ReferenceExecutor, size: int) -> None:
        sizes.append((int(executor.state["prefill_chunk"][0]), int(executor.state["prefill_chunk"][1]), size))
        run(executor, size)

    monkeypatch.setattr(ReferenceExecutor, "prefill", prefill)
    monkeypatch.setattr(prompts, "WARM_UP", 0)
    out = tmp_path / "rows.json"
    given = ["--small", "--device", "cpu", "--prompt", "5", "301", "--at-once", "1", "2", "--runs", "1"]
    assert prompts.main([*given, "--commit", "c0ffee1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(row["prompt"], row["max_prefill_chunks"]) for row in rows] == [(5, 1), (5, 2), (301, 1), (301, 2)]
    assert all(row["ms_p50"] > 0 and row["weights"] == "random" and row["commit"] == "c0ffee1" for row in rows)
    apart = [(0, 128, 128), (128, 128, 128), (256, 45, 64)]
    assert sizes == [(0, 5, 64), (0, 5, 64), *apart, (0, 256, 256), (256, 45, 64)]
