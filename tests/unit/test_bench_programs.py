"""Programs of bench/, tried on tiny models without a GPU: what their rows say, and that these add up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benches import bench

from lowlat.executors.reference import ReferenceExecutor
from lowlat.text.grammar import compiler
from lowlat.tools.bench.geometry import Geometry

first_token = bench("first_token")
start = bench("start")
schema_suite = bench("schema_suite")
prompts = bench("prompts")
parallel, weights = bench("parallel"), bench("weights")
TIMES = ["--small", "--device", "cpu", "--replays", "1", "--turn", "1", "--commit", "c0ffee1"]


@pytest.mark.wide
def test_first_tokens_have_a_row_for_each_prompt_depth_and_way(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    given = ["--directory", tmp_path, "--tiny", "--device", "cpu", "--prompt", 5, "--runs", 1, "--out", out]
    first_token.main([*map(str, given), "--commit", "c0ffee1"])
    found = json.loads(out.read_text())
    assert found["weights"] == "random" and found["commit"] == "c0ffee1"
    cases = [(row["num_speculative_tokens"], row["through"], row["prompt"]) for row in found["rows"]]
    assert cases == [(depth, way, 5) for depth in (0, 3) for way in ("process", "socket")]
    assert all(0 < row["ms_least"] <= row["ms_p50"] <= row["ms_p99"] for row in found["rows"])
    assert all(row["next_ms_p50"] > 0 and row["runs"] == 1 for row in found["rows"])


@pytest.mark.wide
def test_a_process_starts_from_a_written_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    start.main(["--directory", str(tmp_path), "--tiny", "--device", "cpu", "--max-batch", "1", "--max-context", "64",
          "--warm", "0", "--out", str(out)])  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    assert row["kernels"] == "compiled"
    assert 0 < row["read_s"] <= row["ready_s"] <= row["first_token_s"]


@pytest.mark.second
@pytest.mark.parametrize("program", ["serving", "schema_suite", "http"])
def test_programs_with_the_tests_stand_ins_start_from_a_checkout(repository: Path, program: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", f"bench.{program}", "--help"]
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and f"usage: {program}.py" in done.stdout, done.stderr


def test_schemas_are_counted_by_keyword(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case: dict[str, Any] = {"description": "years", "schema": {"type": "string", "format": "date"}}
    case["tests"] = [{"data": "2024-02-29", "valid": True}, {"data": "2023-02-29", "valid": False}]
    refused = {"description": "none", "schema": {"not": {"type": "string"}}, "tests": []}
    folder = tmp_path / "tests" / schema_suite.DRAFT
    folder.mkdir(parents=True)
    (folder / "dates.json").write_text(json.dumps([case, refused]))
    command = [str(tmp_path), "--suite-commit", "none", "--walks", "2", "--out", str(tmp_path / "x.json")]
    assert schema_suite.main(command) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    (row,) = result["rows"]
    assert row["keyword"] == "dates" and (row["served"], row["refused"], row["wrong"], row["walks"]) == (1, 1, 0, 2)
    assert (row["valid_allowed"], row["invalid_left_out"]) == (1, 1) and sum(result["refusals"].values()) == 1
    monkeypatch.setattr(compiler, "exact_text", lambda text: text)  # as the library has it
    case["schema"]["title"] = "not compiled yet"
    (folder / "dates.json").write_text(json.dumps([case]))
    assert schema_suite.main(command) == 1
    result = json.loads((tmp_path / "x.json").read_text())
    assert [fault["document"] for fault in result["faults"]] == ['"2023-02-29"']


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


@pytest.mark.wide
def test_steps_of_several_gpus_have_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert parallel.main([*TIMES, "--only", "tiny, 1 x", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    kinds = [(row["tensor_parallel_size"], row.get("tp_invariant", False)) for row in rows]
    assert kinds == [(1, False), (2, False), (2, True)]
    assert ["exchange_us" in row for row in rows] == [False, True, False]


@pytest.mark.second
def test_a_row_for_each_case_with_its_floor_and_what_is_predicted(tmp_path: Path) -> None:
    """Also what no time was left for has a row."""
    out = tmp_path / "rows.json"
    assert weights.main([*TIMES, "--only", "KV bf16, 2 x", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["weights"] for row in rows] == ["bf16", "fp8", "int4_32"]
    beyond = rows[0]["ms_p50"] - rows[0]["floor_ms"]
    for row in rows:
        assert row["floor_ms"] == pytest.approx(row["bytes"] / 1e8, abs=1e-4) and row["state_bytes"] == 0
        assert row["predicted_ms"] == pytest.approx(row["floor_ms"] + beyond, abs=2e-4)
        assert row["bytes"] <= (1.0 if row["weights"] == "bf16" else 0.7) * rows[0]["bytes"]
    listed = ["--geometry", "qwen3-8b", "--case", "1x64x0", "4x64x0", "--weights", "fp8"]
    assert weights.main([*TIMES, *listed, "--limit-s", "-1", "--out", str(out)]) == 0
    found = [(row["model"], row["weights"], row["batch"], row["skipped"]) for row in json.loads(out.read_text())]
    assert found == [("qwen3-8b", "fp8", batch, "-1 s were over") for batch in (1, 4)]


HYBRID = Geometry(
    {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 64,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "full_attention_interval": 4, "vocab_size": 160, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False, "mtp_num_hidden_layers": 1, "torch_dtype": "bfloat16",
    }
)  # fmt: skip


@pytest.mark.wide
def test_steps_of_hybrids_have_rows_and_draft_by_mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench("lib.model"), "known_geometry", lambda name: HYBRID)
    out, given = (
        tmp_path / "rows.json",
        ["--geometry", "a-small-hybrid", "--method", "mtp", "--weights", "int4"],
    )
    assert weights.main([*TIMES, *given, "--case", "1x40x0", "2x40x2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(row["weights"], row.get("method")) for row in rows] == [
        ("int4", None),
        ("int4", "mtp"),
    ]
    state = 3 * 4 * 16 * 16 * 4  # of three layers, a request
    assert [row["state_bytes"] for row in rows] == [2 * state, 4 * state]
    assert all(row["bytes"] > row["state_bytes"] and 2 <= row["distinct_experts"] <= 8 for row in rows)
