"""The dense benchmark: bytes of a step, its run without a GPU, its report."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench

from lowlat.errors import ShapeError

GIGA = 1e9

cases, clock = bench("dense_cases"), bench("clock")


@pytest.mark.parametrize(("batch", "context", "gigabytes"), [(1, 8192, 16.08), (1, 32768, 19.30), (4, 16384, 23.60)])
def test_bytes_of_a_baseline_step(batch: int, context: int, gigabytes: float) -> None:
    moved = cases.step_bytes(cases.LLAMA_8B, cases.Case(batch, context, 0)) / GIGA
    assert moved == pytest.approx(gigabytes, abs=0.005)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dense") / "results" / "dense.json"
    assert bench("dense").main(["--out", str(out), "--dry-run", "--commit", "abc1234"]) == 0
    return out


FIELDS = {
    **dict.fromkeys(("case", "commit", "card", "driver", "torch", "cuda", "torch_attention", "executor"), str),
    **dict.fromkeys(("batch", "context", "num_speculative_tokens", "bytes", "launches", "replays"), int),
    **dict.fromkeys(("ms_p50", "ms_p99", "host_ms_p50", "wall_gb_per_s", "floor_ms", "over_floor"), float),
    **dict.fromkeys(("torch_graph_ms_p50", "torch_graph_ms_p99", "tokens_per_s", "device_loop_ms_p50"), float),
    "torch_attention_us": dict,
    "tokens_per_s_is_simulated": bool,
}


def test_dry_run_writes_every_field_of_every_case(dry_run: Path) -> None:
    result = cases.read_results(dry_run)
    assert [row["case"] for row in result["rows"]] == [case.name for case in cases.TINY_CASES]
    for row, case in zip(result["rows"], cases.TINY_CASES, strict=True):
        assert {name: type(row.get(name)) for name in FIELDS} == FIELDS
        assert row["commit"] == "abc1234"
        assert row["bytes"] == cases.step_bytes(cases.TINY, case)
        assert row["floor_ms"] == pytest.approx(row["bytes"] / row["wall_gb_per_s"] / 1e6, abs=5e-5)
        length = row["simulated_accept_length"]
        assert (length is None) == (not row["tokens_per_s_is_simulated"]) == (case.num_speculative_tokens == 0)
        expected = 1e3 * case.batch * (length or 1) / row["ms_p50"]
        assert row["tokens_per_s"] == pytest.approx(expected, rel=0.01)
    assert len(result["conditions"]["walls"]) == 2


def sample_result() -> dict[str, Any]:
    """Rows as a run would write them, with made-up times."""
    dense, rows = bench("dense"), []
    for case in cases.CASES:
        floor = cases.step_bytes(cases.LLAMA_8B, case) / 4.5e9
        row = dense._described(cases.LLAMA_8B, case)
        row |= {"ms_p50": 1.1 * floor, "ms_p99": 1.15 * floor, "torch_graph_ms_p50": 1.5 * floor}
        row |= {"card": "a GPU", "driver": "1", "cuda": "13", "torch": "2", "commit": "abc", "replays": 300}
        rows.append(dense._beside_wall(row, 4500.0))
    model = {"name": "Llama-3.1-8B", "weights": "random, bfloat16"}
    return {"conditions": {"model": model, "dry_run": False}, "rows": rows}


def test_table_and_caption_say_what_was_measured() -> None:
    report, result = bench("dense_report"), sample_result()
    lines = report.table(result["rows"]).splitlines()
    assert len(lines) == 2 + len(cases.CASES)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| 1 x 8K, S=0 | 16.08 | 3.57 | 3.93 / 4.11 | 1.10 x | 5.36 | 1.36 x | 254 | - |"
    assert "(sim.)" in lines[5]
    assert "(sim.)" not in lines[4]
    spoken = report.caption(result)
    assert "3.00 at S = 3" in spoken
    assert "4500 GB/s" in spoken
    assert "dry run" not in spoken


def test_percentiles_and_turns() -> None:
    assert clock.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert clock.percentile([float(k) for k in range(300)], 99) == 296.0
    assert clock.percentile([5.0], 99) == 5.0
    with pytest.raises(ValueError, match="no values"):
        clock.percentile([], 50)
    order: list[str] = []
    entries = [
        clock.Timed(name, lambda name=name: order.append(name), lambda name=name: order.append(name.upper()))
        for name in "ab"
    ]
    clock.round_robin(entries, 5, 3, torch.device("cpu"))
    assert "".join(order) == "AaaaaaBbbbbbAaaaaBbbbb"  # a reset, two replays untimed, then at most three timed
    assert [len(entry.ms) for entry in entries] == [5, 5]


def test_rows_of_single_kernels() -> None:
    micro = bench("micro")
    entry = micro.Entry("copy", lambda copy: [], copies=10, moved_bytes=4_000_000)
    row = micro.describe(entry, [0.02, 0.01, 0.03], wall_gb_per_s=4000.0)
    assert row["us_p50"] == 2.0
    assert row["us_p99"] == 3.0
    assert row["gb_per_s"] == 2000.0
    assert row["share_of_wall"] == 0.5
    assert "gb_per_s" not in micro.describe(micro.Entry("small", lambda copy: []), [0.02], 4000.0)


def test_a_kernel_that_does_not_compile_is_told_by_name() -> None:
    micro = bench("micro")

    def fail(copy: int) -> Any:
        raise ShapeError(f"no copy {copy}")

    class NoLauncher:
        device = torch.device("cpu")

    (row,) = micro.time_entries(NoLauncher(), [micro.Entry("broken", fail)])
    assert row == {"name": "broken", "error": "ShapeError: no copy 0"}
