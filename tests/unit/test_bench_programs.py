"""Programs of bench/, tried on tiny models without a card: what their rows say, and that these add up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benches import bench

from bench.dense_cases import LLAMA_8B, step_bytes
from bench.weights import CASES, WeightsCase, weight_bytes
from lowlat.executors.reference import ReferenceExecutor
from lowlat.kernels.toolchain.kernel import H200, KernelCall
from lowlat.models.partial_kv import PartialKV
from lowlat.models.target import load_target
from lowlat.speculators.eagle3.weights import load_draft_model
from lowlat.step.prefill import build_prefills
from lowlat.text.grammar import compiler
from lowlat.tools.tune.pairs import LoweredPrograms, Pair

first_token = bench("first_token")
specpv = bench("specpv")
cases, start = bench("dense_cases"), bench("start")
GEOMETRY = replace(cases.TINY, capture_boundaries=(2, 3, 4))  # SpecForge cannot write those of TINY
structured = bench("structured")
SHORT = "--limit 1 --probes 1 --max-tokens 16 --temperature 0 --chains 2 --rows 4 --dynamic 2x2"
schema_suite = bench("schema_suite")
sustained = bench("sustained")
prompts, targets = bench("prompts"), bench("targets")
weights = bench("weights")


@pytest.mark.second
def test_first_tokens_have_a_row_for_each_prompt_depth_and_way(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    given = ["--directory", tmp_path, "--tiny", "--device", "cpu", "--prompt", 5, 140, "--runs", 2, "--out", out]
    first_token.main([*map(str, given), "--commit", "c0ffee1"])
    found = json.loads(out.read_text())
    assert found["weights"] == "random" and found["commit"] == "c0ffee1"
    cases = [(row["num_speculative_tokens"], row["through"], row["prompt"]) for row in found["rows"]]
    assert cases == [(depth, way, length) for depth in (0, 3) for way in ("process", "socket") for length in (5, 140)]
    assert all(0 < row["ms_least"] <= row["ms_p50"] <= row["ms_p99"] for row in found["rows"])
    assert all(row["next_ms_p50"] > 0 and row["runs"] == 2 for row in found["rows"])


def test_cycles_are_those_of_a_step_of_the_largest_tile() -> None:
    """Where all multiprocessors multiply all the time: 224 by 8 tiles are 14 turns of 132, of 64 steps each."""
    clock, power, heat = sustained.read_sample("1410, 723.45, 51")
    assert (clock, power, heat) == (1410, 723.45, 51)
    found = sustained.reckoned({"rows": 2048, "us": 724.9, "sm_mhz": clock}, 28672, 4096, 132)
    assert found == {"tflop_per_s": 663.6, "cycles_a_step": round(724.9 * 1410 / 14 / 64)}
    with pytest.raises(ValueError, match="N/A"):
        sustained.read_sample("[N/A]")


def test_a_cycle_of_lossless_specpv_is_its_proposals_and_what_is_left_and_pays_from_some_agreement_on() -> None:
    steps: dict[str, list[Any]] = {"step_ms": [73.0, 61.0, 73.0, 81.0, 89.0], "proposed": [31, 25, 31, 31, 31]}
    found = specpv.Run(**steps, refreshed=[0, 0, 0, 1, 2])
    full, partial = specpv.Run(step_ms=[6.0, 6.0]), specpv.Run(step_ms=[2.0, 2.0])
    sizes = PartialKV(64, 4, 8, 2, 4, buffer=31, threshold=8192, num_refresh_steps=32, lossless=True)
    cycle = specpv.cycle(sizes, 1, 3.1, found, full, partial)
    names = ("partial_steps_a_cycle", "ms_a_proposal", "ms_a_verification", "ms_a_refresh")
    assert [cycle[name] for name in names] == [31, 2.0, 11.0, 8.0]
    # ten steps of 2 ms, 11 ms and a quarter of 8 ms bring 32 tokens where each is right, steps over all 3.1 in 6 ms
    gains = cycle["gain_by_agreement"]
    assert gains["1.0"] == pytest.approx(32 / 33 / (3.1 / 6), abs=1e-3)
    assert gains["0.9"] < 1 < gains["0.97"] < gains["0.99"] < gains["1.0"]
    four = specpv.cycle(sizes, 4, 3.1, found, full, partial)["gain_by_agreement"]  # each request is refreshed by itself
    assert four["1.0"] == pytest.approx(32 / 39 / (3.1 / 6), abs=1e-3)


@pytest.mark.second
@pytest.mark.parametrize("batch", [1, 2])
def test_lossless_rows_of_a_geometry_have_cycles_timed_beside_the_partial_steps_they_are_made_of(
    tmp_path: Path, batch: int
) -> None:
    out = tmp_path / "specpv.json"
    sizes = ["--context", "512", "--retrieval", "4", "--threshold", "128", "--tokens", "160"]
    sizes += ["--batch", str(batch)]
    assert specpv.main(["--model", "tiny", "--lossless", "--device", "cpu", "--out", str(out), *sizes]) == 0
    full, partial, cycles = json.loads(out.read_text())
    assert (full["attention"], partial["lossy"], cycles["lossy"]) == ("full", True, False)
    assert (partial["simulated"], cycles["simulated"]) == (True, False)
    assert cycles["ms_a_proposal"] == partial["ms_p50"] < cycles["ms_p50"] and cycles["partial_steps_a_cycle"] > 2
    assert cycles["verified_tokens"] > 0 and {row["batch"] for row in (full, partial, cycles)} == {batch}


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


def test_long_contexts_have_a_table_of_each_temperature() -> None:
    report = bench("long_report")
    row = {"texts": "all", "temperature": 0.7, "draft_model": "yarn", "context": 2048, "mean_acceptance_length": 1.9}
    row |= {"decode_tokens_per_s": 300.0, "baseline_decode_tokens_per_s": 200.0}
    others = {"draft_model": "short", "context": 65536}, {"texts": "unseen", "mean_acceptance_length": 9.0}
    assert list(report.acceptance_tables([row, *({**row, **other} for other in others)])) == [
        "| T = 0.7: mean acceptance length (speed over S = 0) | 2K | 64K |",
        "| --- | --- | --- |",
        "| yarn | 1.90 (1.50) | |",
        "| short | | 1.90 (1.50) |",
        "",
    ]
    losses = [{"target": "long", "texts": "unseen", "from": 1024, "to": 1500, "loss": 1.234}]
    assert list(report.loss_table(losses))[::2] == ["| loss at positions | 1K to 1500 |", "| long, unseen | 1.23 |"]


@pytest.mark.second
def test_the_same_places_stand_behind_contexts_of_every_length(tmp_path: Path) -> None:
    long_contexts, demo = bench("long_contexts"), bench("acceptance").DEMO
    texts = dict.fromkeys(("unseen 0", "Manual"), "The number of rows that a query returns is limited. " * 20)
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    models = ["--draft-model", f"plain={demo / 'head'}", f"windowed={demo / 'head'}@16"]
    sizes = ["--contexts", "96", "48", "--place", "128", "--max-tokens", "12", "--temperature", "0", "--device", "cpu"]
    given = ["--target", demo / "target", "--texts", tmp_path / "texts.json", "--out", tmp_path / "out.json"]
    long_contexts.main([*map(str, given), *models, *sizes, "--commit", "c0ffee1"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["conditions"]["commit"] == "c0ffee1" and found["left_out"] == []
    assert [(row["draft_model"], row["draft_window"], row["context"], row["texts"]) for row in found["rows"]] == [
        (*model, context, group)
        for model in (("plain", None), ("windowed", 16))
        for context in (48, 96)
        for group in ("all", "unseen", "withheld")
    ]
    for row in found["rows"]:
        assert row["identical"] and row["prompts"] == (2 if row["texts"] == "all" else 1)
        assert row["tokens"] == 12 * row["prompts"] and 1 <= row["mean_acceptance_length"] <= 4
        assert row["ms_per_step"] > 0 and row["baseline_ms_per_step"] > 0
    long_contexts.main([*map(str, given), *models, *sizes, "--minutes", "0"])
    late = json.loads((tmp_path / "out.json").read_text())
    assert late["rows"] == [] and late["left_out"][0] == ["plain", 48] and len(late["left_out"]) == 4
    with pytest.raises(SystemExit, match="prompts end at"):
        long_contexts.main([*map(str, given), *models, *sizes, "--place", "2000"])
    with pytest.raises(SystemExit):
        long_contexts.main([*map(str, given), *models, *sizes, "--place", "64"])


def test_the_checkpoint_holds_the_weights_by_their_public_names(tmp_path: Path) -> None:
    target_path, head_path = start.write_checkpoint(GEOMETRY, tmp_path, torch.device("cpu"))
    target = load_target(target_path, dtype="bfloat16")
    head = load_draft_model(head_path, target.config)
    expected = cases.make_weights(GEOMETRY, torch.device("cpu"))
    found = {**target.weights, **head.weights}
    assert head.config.capture_boundaries == GEOMETRY.capture_boundaries
    for name in ("layers.1.qkv.weight", "layers.3.gate_up.weight", "lm_head.weight", "head.fc.weight"):
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found["head.draft_to_target"], expected["head.draft_to_target"])


@pytest.mark.second
def test_a_process_starts_from_a_written_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    start.main(["--directory", str(tmp_path), "--tiny", "--device", "cpu", "--max-batch", "1", "--max-context", "64",
          "--warm", "0", "--out", str(out)])  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    assert row["kernels"] == "compiled"
    assert 0 < row["read_s"] <= row["ready_s"] <= row["first_token_s"]


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
    given = ["--geometry", "none", "--context", "20", "--window", "20", "--steps", "4", "--depth", "3", "--batch", "2"]
    out = tmp_path / "structured.json"
    assert structured.main([*given, "--device", "cpu", "--out", str(out)]) == 0
    (subject,) = json.loads(out.read_text())["subjects"]
    (inside, through), (forced,) = subject["rows"], subject["forced"]
    for row in (inside, through):
        for kind in ("plain", "grammar", "beside"):
            assert 0 < row[kind]["p50_us"] <= row[kind]["p99_us"] and row[kind]["steps"] >= 4
            assert 1 <= row[kind]["tokens_per_step"] <= 4
        ratio = row["grammar"]["p50_us"] / row["plain"]["p50_us"]
        assert row["p50_over_plain"] == pytest.approx(ratio, abs=1e-4)
    assert (inside["through"], through["through"]) == ("process", "socket") and inside["mask_us"] > 20
    assert forced["with"]["tokens_per_step"] > forced["without"]["tokens_per_step"]


@pytest.mark.second
def test_shapes_of_drafts_stand_side_by_side(tmp_path: Path) -> None:
    prompts, out, trees = tmp_path / "prompts.json", tmp_path / "trees.json", bench("trees")
    prompts.write_text(json.dumps(["We the People of", "The President shall"]))
    trees.main([*SHORT.split(), "--prompts", str(prompts), "--out", str(out)])
    found = json.loads(out.read_text())
    (table,) = found["conditions"]["acceptance_by_rank"].values()
    assert [len(row) for row in table] == [trees.RANKS] * trees.DEPTH
    assert table[0][0] > 0 and all(sum(row) <= 1 for row in table)
    assert [(row["shape"], row["rows"]) for row in found["rows"]] == [("chain", 3), ("static", 4), ("dynamic", 4)]
    for row in found["rows"]:
        assert row["identical"] and row["tokens"] == 16
        assert 1 < row["mean_acceptance_length"] <= row["num_speculative_tokens"] + 1
        assert not any(name.endswith("tokens_per_s") for name in row)
    again = [
        "--prompts",
        str(prompts),
        "--acceptance",
        str(out),
        "--shapes",
        "static",
        "--out",
        str(tmp_path / "again.json"),
    ]
    trees.main([*SHORT.split(), *again])
    assert json.loads((tmp_path / "again.json").read_text())["rows"] == found["rows"][1:2]
    given = ["--geometry", "tiny", "--context", "40", "--acceptance", str(out)]
    trees.main([*SHORT.split(), "--max-tokens", "24", *given, "--device", "cpu", "--out", str(tmp_path / "timed.json")])
    timed = json.loads((tmp_path / "timed.json").read_text())
    assert timed["conditions"]["context"] == 40 and "imposed" in timed["conditions"]["simulated"]
    for row, real in zip(timed["rows"], found["rows"], strict=True):
        assert (row["shape"], row["rows"]) == (real["shape"], real["rows"])
        assert row["imposed_accept_length"] == real["mean_acceptance_length"]
        assert row["tokens_per_s"] == pytest.approx(1000 * row["imposed_accept_length"] / row["ms_a_step"], rel=0.01)
        assert row["baseline_tokens_per_s"] == pytest.approx(1000 / row["baseline_ms_a_step"], rel=0.01)


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


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_prompts_of_rounded_weights_multiply_them_as_they_are_held(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-3.1-8B's shape, sixteen chunks at once: no library is called, and every GEMM reads codes."""
    monkeypatch.setattr(prompts, "WARM_UP", 0)
    out, name = tmp_path / "rows.json", f"llama-8b-{kind}"
    given = ["--small", "--model", name, "--device", "cpu", "--prompt", "5", "--at-once", "1", "--runs", "1"]
    assert prompts.main([*given, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["model"], row["prompt"], row["weights"]) == ("tiny", 5, "random")
    assert targets.small_model(name).weights == kind and targets.small_model("120b") is cases.TINY
    shapes = replace(targets.target_shapes(targets.BY_NAME[name], 2048), max_prefill_chunks=16)
    shapes = replace(shapes, config=replace(shapes.config, num_layers=1, windows=(None,)))
    programs = build_prefills(shapes)
    lowered = LoweredPrograms(Pair(name, shapes.config, None), H200, programs.values())
    calls = [call for group in lowered.groups(programs[2048], H200) for call in group.calls]
    names = [call.kernel.name for call in calls if isinstance(call, KernelCall)]
    gemms = [each for each in names if each.startswith("prefill_gemm")]
    assert len(names) == len(calls) and len(gemms) == 4
    assert all(each.startswith(f"prefill_gemm_{kind}") for each in gemms)


def test_random_models_load_and_parts_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = bench("load")
    load.main(["--shape", "tiny", "--part", "1", "--scratch", str(tmp_path)])
    assert not list(tmp_path.iterdir())
    found = json.loads(capsys.readouterr().out)
    load.write_model(tmp_path / "model", "tiny", 1)
    target = load_target(tmp_path / "model")
    one = load.measure(tmp_path / "model", torch.device("meta"), cold=False)
    assert target.config.experts is not None and target.config.experts.weight_format == "mxfp4"
    for name in ("cold", "warm"):
        assert found[name]["bytes"] == 2 * one["bytes"]  # two parts of one layer, each with its embedding
        assert found[name]["gb_per_s"] > 0 and found[name]["seconds"] > 0
        assert found[name]["host_load_bytes"] == one["host_load_bytes"] > 0
    out = tmp_path / "load.json"
    for commit in ("first", "second"):
        load.main(["--directory", str(tmp_path / "model"), "--commit", commit, "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [row["commit"] for row in rows] == ["first", "second"]
    assert all(row["model"] == "model" and row["warm"]["bytes"] == one["bytes"] for row in rows)
    load.main(["--directory", str(tmp_path / "model"), "--runs", "warm", "--out", str(out)])
    alone = json.loads(out.read_text())[2]
    assert alone["warm"]["bytes"] == one["bytes"] and "cold" not in alone
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.second
def test_a_row_for_each_case_with_its_floor_and_what_is_predicted(tmp_path: Path) -> None:
    """Also what no time was left for has a row."""
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
    listed = ["--geometry", "qwen3-8b", "--case", "1x64x0", "4x64x0", "--weights", "fp8"]
    assert weights.main([*given, *listed, "--limit-s", "0", "--out", str(out)]) == 0
    found = [(row["model"], row["weights"], row["batch"], row["skipped"]) for row in json.loads(out.read_text())]
    assert found == [("qwen3-8b", "fp8", batch, "0 s were over") for batch in (1, 4)]


def test_bytes_of_plain_weights_are_the_dense_benchmark_s() -> None:
    plain = [case for case in CASES if case.model == "llama-8b" and {case.weights, case.kv, case.draft} == {"bf16"}]
    assert len(plain) == 3 and all(weight_bytes(LLAMA_8B, each) == step_bytes(LLAMA_8B, each.step) for each in plain)
    fp8 = WeightsCase("llama-8b", "fp8", "fp8", "fp8", plain[0].step)
    assert weight_bytes(LLAMA_8B, fp8) == pytest.approx(step_bytes(LLAMA_8B, fp8.step) / 2, rel=1e-3)
