"""`lowlat profile` on the command line: refusals, and tables, JSON and trace of a recording that is made up."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import edit_json
from cli_calls import answer, lowlat, refusal
from profiling_cases import CPU, cover, cover_ranks, record_of

from lowlat import Runtime
from lowlat.cli import running
from lowlat.cli.options import bundled
from lowlat.executors.devices import DeviceChoice
from lowlat.tools.profile import recording as profiling
from lowlat.tools.profile import sites

SMALL = ("profile", "--context", 20, "--steps", 2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that is not there: the steps run on the CPU, their kernels are recorded as if they had been launched."""
    seen: dict[str, Any] = {}

    def choose(device: str, executor: str) -> DeviceChoice:
        seen["card"] = device
        return DeviceChoice(CPU, executor, "a test")

    monkeypatch.setattr(profiling, "choose_gpu", choose)
    monkeypatch.setattr(profiling, "gpu_wall", lambda device: 4500.0)
    monkeypatch.setattr(profiling, "gpu_name", lambda device: "A GPU")
    load = running.load_runtime

    def load_on_cpu(model: Path, speculative: Any, max_context: int, **options: Any) -> Runtime:
        seen.update(options, max_context=max_context, speculative=speculative)
        runtime = load(model, speculative, max_context, max_batch=options["max_batch"], device="cpu")
        groups = cover(runtime, model, None if speculative is None else Path(speculative.model))
        bucket = runtime.ladder.choose(options["max_batch"], runtime.num_speculative_tokens)
        seen["num_launches"] = sum(len(group.calls) for group in groups(bucket))
        size = options.get("tensor_parallel_size", 1)
        if size > 1:
            ranks = cover_ranks(runtime, speculative, size)
            groups = ranks[0].groups
            monkeypatch.setattr(runtime.executor, "ranks", ranks, raising=False)
        monkeypatch.setattr(runtime.executor, "groups", groups, raising=False)
        monkeypatch.setattr(profiling, "record_kernels", record_of(groups, bucket, profiling.LEAD + 2))
        return runtime

    monkeypatch.setattr(running, "load_runtime", load_on_cpu)
    return seen


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.executors.devices.nvidia_gpu_present", lambda: False)
    assert "lowlat profile needs an NVIDIA GPU, and there is none to use: no NVIDIA GPU" in refusal("profile")
    assert "lowlat profile needs an NVIDIA GPU" in refusal("profile", "--device", "cpu", "--executor", "eager")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "device must be 'auto'"),
        (["--executor", "reference"], "'reference' is not one of 'graph', 'eager'"),
        (["--batch", "33"], "33 is not in the range 1<=x<=32"),
        (["--context", "0"], "0 is not in the range"),
        (["--steps", "0"], "0 is not in the range"),
        ([str(bundled("target")), "-S", "2"], "--num-speculative-tokens needs a draft model (--draft-model DIR)"),
        (["-S", "8"], "num_speculative_tokens must be from 0 to 7"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: list[str], message: str) -> None:
    assert message in refusal("profile", *arguments)


def test_tables_show_stages_kernels_and_idle_time(gpu: dict[str, Any]) -> None:
    shown = lowlat(*SMALL)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    title = lines[0]
    assert title.startswith("target on A GPU, graph executor: batch 1, 4 rows, S = 3, context ")
    assert title.endswith("means over 2 steps")
    stages = [line.split()[0] for line in lines if line.split() and line.split()[0].isupper()]
    order = ["BASE_DECODE_STEP", "EAGLE_ACCEPT", "EAGLE_TAIL_COMMIT", "EAGLE_DRAFT_FC"]
    assert stages[0] == "ACTIVE_SLOTS"
    assert stages[1:5] == order
    assert stages[-2:] == ["EAGLE_TREE_MASKS", "PUBLISH"]
    (publish,) = (line for line in lines if line.split()[:1] == ["PUBLISH"])
    assert publish.rstrip().endswith("done by kernels of EAGLE_TREE_MASKS")
    total = next(line for line in lines if "the step" in line)
    assert f"{10.0 * gpu['num_launches']:.1f}" in total
    assert "decode_gemm_silu" in shown.stdout
    assert "wall: 4500 GB/s" in shown.stdout
    assert lines[-1].startswith("idle: no kernel ran for ")
    assert (gpu["executor"], gpu["dtype"], gpu["max_batch"]) == ("graph", "auto", 1)


@pytest.mark.second
def test_json_is_the_whole_profile_and_a_trace_is_written(gpu: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = answer(*SMALL, "--batch", 2, "-S", 1, "--executor", "eager", "--json", "--trace", path)
    assert (found["model"], found["card"], found["executor"]) == ("target", "A GPU", "eager")
    assert (found["batch"], found["rows"], found["num_speculative_tokens"]) == (2, 2, 1)
    assert (found["wall_gb_per_s"], found["num_steps"]) == (4500.0, 2)
    assert len(found["contexts"]) == 2 and min(found["contexts"]) > 20
    assert sum(row["time_us"] or 0 for row in found["stages"]) == pytest.approx(found["step_us"])
    assert sum(row["num_launches"] for row in found["kernels"]) == found["num_launches"] == gpu["num_launches"]
    assert found["idle"]["between_us"] == pytest.approx(25.0)
    assert gpu["max_batch"] == 2 and gpu["speculative"].num_speculative_tokens == 1
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "kernel" for event in events) == 2 * gpu["num_launches"]
    assert "S = 1" in next(each["args"]["name"] for each in events if each["name"] == "process_name")


@pytest.mark.wide
def test_of_several_gpus_each_tells_what_it_all_reduces(gpu: dict[str, Any]) -> None:
    shown = lowlat(*SMALL, "--tensor-parallel", 2, "--devices", "2,3")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("target on 2 x A GPU, graph executor: ")
    place = next(number for number, line in enumerate(lines) if line.startswith("what GPUs exchange"))
    rows = [line.split() for line in lines[place:] if line.split()[:1] in (["cuda:0"], ["cuda:1"])]
    assert len(rows) == 2 and all(float(cell) > 0 for row in rows for cell in row[1:4])
    assert (gpu["card"], gpu["tensor_parallel_size"], gpu["devices"]) == ("cuda:2", 2, (2, 3))
    found = answer(*SMALL, "--tensor-parallel", 2, "--json")
    assert found["tensor_parallel_size"] == 2 and len(found["cards"]) == 2
    assert found["cards"][0]["all_reduce_us"] == pytest.approx(found["all_reduce"]["time_us"])


def test_trace_without_a_directory_is_refused_before_anything_runs(gpu: dict[str, Any], tmp_path: Path) -> None:
    assert "there is no directory" in refusal(*SMALL, "--trace", tmp_path / "no" / "trace.json")
    assert "max_batch" not in gpu


@pytest.mark.second
def test_a_long_context_is_shortened_and_said(gpu: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(bundled("target"), tmp_path / "target")
    edit_json(tmp_path / "target" / "config.json", max_position_embeddings=256)
    shown = lowlat("profile", tmp_path / "target", "--context", 5000, "--steps", 2, "--json")
    assert shown.exit_code == 0, shown.output
    assert "not 5000: the model has 256 positions" in shown.stderr
    assert gpu["max_context"] == 256 and gpu["speculative"] is None
    assert 200 < json.loads(shown.stdout)["contexts"][0] < 256


@pytest.mark.second
def test_a_recording_that_is_not_whole_is_an_error(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sites_of = sites.call_sites
    monkeypatch.setattr(profiling, "call_sites", lambda *arguments: sites_of(*arguments)[:-1])
    assert "which are not whole steps of" in refusal(*SMALL, code=1)
