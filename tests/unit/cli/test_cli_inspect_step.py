"""`lowlat inspect step`: a step planned for a GPU that is not there, as a runtime would lower it."""

from pathlib import Path

import pytest
from cli_calls import answer, lowlat, refusal
from lowered import Pair
from tiny_models import PairPaths

from lowlat.cli.options import bundled
from lowlat.tools.gpus import describe_gpu


def test_the_bundled_step_is_what_is_lowered() -> None:
    found = answer("inspect", "step", "-S", 3, "--full", "--json")
    pair = Pair(bundled("target"), bundled("head"))
    program = pair.program(3, 1)
    lowered = pair.lower_program(program, describe_gpu("h200").facts)
    step = found["step"]
    assert found["method"] == "eagle3" and found["kernels_do_not_cover"] is None
    assert found["bucket"] == {"name": "batch 1, 4 rows, S = 3", "batch": 1, "rows": 4, "num_speculative_tokens": 3}
    assert step["operations"] == len(program.ops) == sum(row["operations"] for row in step["stages"])
    assert step["launches"] == sum(len(group.calls) for group in lowered.groups)
    assert step["launches"] == sum(row["launches"] for row in step["stages"])
    assert [group["name"] for group in step["groups"]] == [group.name for group in lowered.groups]
    assert [kind for group in step["groups"] for kind in group["operations"]] == [str(op) for op in program.ops]
    launched = [launch for group in step["groups"] for launch in group["launches"]]
    assert all(launch["kernel"] and launch["block"] > 0 and min(launch["grid"]) > 0 for launch in launched)
    assert {buffer["name"] for buffer in step["buffers"]} == set(program.buffers)
    layers = max(step["stages"], key=lambda row: row["launches"])
    assert layers["times"] == pair.target.config.num_layers and "attention" in [k["name"] for k in layers["kernels"]]
    matrices = sum(
        weight.nbytes for name, weight in pair.target.weights.items() if name.startswith("layers.")
    )  # each once
    assert layers["weights_bytes"] == pytest.approx(matrices, rel=1e-3)
    for part in ("weights", "kv_read", "kv_written"):
        assert step[f"{part}_bytes"] == pytest.approx(sum(row[f"{part}_bytes"] for row in step["stages"]), abs=20)
    fusions = {fusion["name"]: fusion for fusion in step["fusions"]}
    names = [group.name for group in lowered.groups]
    assert fusions["gemm+silu"]["times"] == names.count("gemm+silu")
    assert fusions["gemm+silu"]["operations"] == ["rms_norm", "linear", "silu_mul"]


def test_a_preset_has_its_draft_model_and_its_published_size() -> None:
    found = answer("inspect", "step", "llama-8b", "--spec-tokens", 2, "--context", 2048, "--batch", 2, "--json")
    assert found["method"] == "eagle3" and found["bucket"]["rows"] == 3 and found["bucket"]["batch"] == 2
    row = next(row for row in found["step"]["stages"] if row["times"] == 32)
    assert row["weights_bytes"] == pytest.approx(2 * 6.979e9, rel=1e-3)  # the published layers, in bf16
    assert row["kv_read_bytes"] == 2 * 2047 * 32 * 2 * 8 * 128 * 2  # slots, positions, layers, K and V, heads, bf16
    assert row["kv_written_bytes"] == 2 * 3 * 32 * 2 * 8 * 128 * 2
    gpu, total = found["gpu"], found["step"]
    moved = total["weights_bytes"] + total["kv_read_bytes"] + total["kv_written_bytes"]
    assert total["floor_us"] == pytest.approx(moved / gpu["read_gb_per_s"] / 1e3, rel=1e-3)
    plain = answer("inspect", "step", "llama-8b", "-S", 0, "--json")
    assert plain["method"] is None or plain["bucket"]["rows"] == 1
    assert plain["step"]["operations"] < total["operations"]


@pytest.mark.second
def test_method_auto_of_a_preset_is_its_mtp_layer_or_its_first_draft_model() -> None:
    for preset, method in (("qwen3.5-9b", "mtp"), ("llama-8b", "eagle3")):
        found = answer("inspect", "step", preset, "--method", "auto", "-S", 1, "--json")
        assert found["method"] == method and found["bucket"]["rows"] == 2


@pytest.mark.parametrize("gpu", ["b200", "h100"])
def test_any_described_gpu(gpu: str) -> None:
    found = answer("inspect", "step", "--gpu", gpu, "--json")
    facts = describe_gpu(gpu).facts
    assert found["gpu"]["multiprocessors"] == facts.num_multiprocessors and found["step"]["launches"] > 0
    assert found["gpu"]["tuned"] is (gpu == "h100")


@pytest.mark.second
def test_experts_and_chosen_widths() -> None:
    experts = answer("inspect", "step", "tiny-experts", "--dtype", "bfloat16", "-S", 0, "--json")
    row = next(row for row in experts["step"]["stages"] if row["times"] == 2)  # a windowed layer and a full one
    assert row["weights_bytes"] > 0 and "experts_gate_up" in str(experts["step"]["fusions"])
    chosen = answer("inspect", "step", "-S", "auto", "--json")
    assert chosen["bucket"]["num_speculative_tokens"] == 7 and chosen["step"]["operations"] > 100


@pytest.mark.second
def test_several_gpus_share_a_model_and_text_drafts_beside_it() -> None:
    whole = answer("inspect", "step", "llama-8b", "-S", 2, "--text-drafts", "suffix", "--json")
    assert (whole["method"], whole["text_drafts"], whole["gpu"]["count"]) == ("eagle3", "suffix", 1)
    shared = answer("inspect", "step", "llama-8b", "-S", 2, "--tensor-parallel", 2, "--json")
    assert (shared["text_drafts"], shared["gpu"]["count"]) == (None, 2)
    assert shared["step"]["weights_bytes"] == pytest.approx(whole["step"]["weights_bytes"] / 2, rel=0.01)


def test_the_tables_fit_a_screen() -> None:
    result = lowlat("inspect", "step")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) < 160
    assert any(line.count("x 8") for line in lines) and "fusions that apply" in result.stdout
    full = lowlat("inspect", "step", "--full").stdout
    assert len(full.splitlines()) > 200 and "apply_commands(" in full and "decode_gemm_" in full


def test_the_readme_shows_what_is_printed(repository: Path) -> None:
    page = (repository / "lowlat" / "step" / "README.md").read_text(encoding="utf-8")
    shown = page.split("$ lowlat inspect step llama-8b\n")[1].split("```")[0]
    printed = {" ".join(line.split()) for line in lowlat("inspect", "step", "llama-8b").stdout.splitlines()}
    assert {" ".join(line.split()) for line in shown.splitlines()} <= printed


@pytest.mark.second
@pytest.mark.parametrize(
    ("preset", "said", "layers"),
    [
        ("llama-8b", "A Llama layer takes six launches", [6]),
        ("gpt-oss-20b", "A layer of gpt-oss takes six launches, or five if its attention has a short window", [5, 6]),
        ("gemma-4-31b", "A dense layer of Gemma 4 takes nine launches, with windows or without", [9] * 6),
    ],
)
def test_the_page_of_kernels_counts_the_launches_of_layers(
    repository: Path, preset: str, said: str, layers: list[int]
) -> None:
    """Of the layers that a step repeats."""
    assert said in (repository / "kernels" / "README.md").read_text(encoding="utf-8")
    found = answer("inspect", "step", preset, "-S", 0, "--context", 8192, "--json")
    row = max(found["step"]["stages"], key=lambda row: row["launches"])
    assert row["times"] > 1 and row["launches"] == row["times"] * sum(layers)


def test_models_that_kernels_do_not_cover_show_their_operations(pair: PairPaths) -> None:
    found = answer("inspect", "step", pair.target, "--json")
    assert "dtype is float32" in found["kernels_do_not_cover"]
    assert found["step"]["launches"] == 0 and found["step"]["operations"] > 20


def test_what_is_refused(tmp_path: Path) -> None:
    assert "GPU 'tpu' is not described; there are h200" in refusal("inspect", "step", "--gpu", "tpu")
    assert "no such directory" in refusal("inspect", "step", tmp_path / "none")
    assert "give one of them" in refusal("inspect", "step", "-S", 2, "--spec-tokens", 2)
    assert "exceeds max_context" in refusal("inspect", "step", "--context", 64, "--max-context", 32)
    assert "boundaries of its own" in refusal("inspect", "step", "tiny", "--capture-layers", "1,2,3")
