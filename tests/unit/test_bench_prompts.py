"""The benchmark of whole prompts, tried on a tiny model without a card."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def bench_is_importable(repository: Path) -> Iterator[None]:
    """`bench` is no part of the package: it is run from a checkout."""
    sys.path.insert(0, str(repository))
    yield
    sys.path.remove(str(repository))


def test_a_row_for_each_prompt_and_number_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position is prefilled once, in as few calls as may be."""
    from bench import prompts
    from lowlat.executors.reference import ReferenceExecutor

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
