"""The benchmark of weights by format, tried on a tiny model without a card."""

import json
from pathlib import Path

import pytest
from benches import bench

from bench.dense_cases import LLAMA_8B, step_bytes
from bench.weights import CASES, WeightsCase, weight_bytes

weights = bench("weights")


def test_a_row_for_each_case_with_its_floor_and_what_is_predicted(tmp_path: Path) -> None:
    """Also what a build does not have, or no time was left for, has a row."""
    out, given = tmp_path / "rows.json", ["--small", "--device", "cpu", "--replays", "1", "--turn", "1"]
    names = ["tiny bf16, LM head bf16, KV bf16", "tiny int4_32, LM head", "tiny fp8, LM head fp8, KV bf16, draft fp8"]
    only = [word for name in names for word in ("--only", name)]
    assert weights.main([*given, *only, "--commit", "c0ffee1", "--out", str(out)]) == 0
    rows = {(row["weights"], row["num_speculative_tokens"], row["batch"]): row for row in json.loads(out.read_text())}
    assert set(rows) == {
        ("bf16", 0, 1),
        ("int4_32", 0, 1),
        ("bf16", 3, 1),
        ("fp8", 3, 1),
        ("bf16", 0, 2),
        ("int4_32", 0, 2),
    }
    for (kind, depth, batch), row in rows.items():
        plain = rows["bf16", depth, batch]
        assert (
            row["commit"] == "c0ffee1"
            and row["ms_p50"] > 0
            and row["floor_ms"] == pytest.approx(row["bytes"] / 1e8, abs=1e-4)
        )
        beyond = plain["ms_p50"] - plain["floor_ms"]
        assert row["predicted_ms"] == pytest.approx(row["floor_ms"] + beyond, abs=2e-4)
        assert row["bytes"] <= (1.0 if kind == "bf16" else 0.6) * plain["bytes"]
    listed = ["--geometry", "llama-1b", "--case", "1x64x0", "4x64x0", "--weights", "fp8"]
    assert weights.main([*given, *listed, "--limit-s", "0", "--out", str(out)]) == 0
    found = [(row["model"], row["weights"], row["batch"], row["skipped"]) for row in json.loads(out.read_text())]
    assert found == [("llama-1b", "fp8", batch, "0 s were over") for batch in (1, 4)]


def test_bytes_of_plain_weights_are_the_dense_benchmark_s() -> None:
    plain = [case for case in CASES if case.model == "llama-8b" and {case.weights, case.kv, case.draft} == {"bf16"}]
    assert len(plain) == 3 and all(weight_bytes(LLAMA_8B, each) == step_bytes(LLAMA_8B, each.step) for each in plain)
    fp8 = WeightsCase("llama-8b", "fp8", "fp8", "fp8", plain[0].step)
    assert weight_bytes(LLAMA_8B, fp8) == pytest.approx(step_bytes(LLAMA_8B, fp8.step) / 2, rel=1e-3)
