"""`lowlat bench` on the command line: small runs on the CPU, resumed, gated, compared and reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_calls import lowlat, refusal

from lowlat.cli.options import bundled
from lowlat.cli.paths import NEW_RESULTS
from lowlat.errors import ConfigError
from lowlat.tools.bench.gates import GateState
from lowlat.tools.bench.measure import CaseRun
from lowlat.tools.bench.results import read_result, read_struct

TINY = ("--geometry", "tiny", "--device", "cpu", "--simulated-acceptance", 0.75)
SMALL = ("--context", 40, "--batch", 1, "--steps", 4, "--warm-up", 1)
GATES = """
[[gates]]
name = "small"
context = 40
batch = 1
num_speculative_tokens = 3
steps = 4
warm_up = 1
repeats = 1
needed = 3
min_speed_up = {speed_up}
min_accept_length = 2.0
"""


def last_line(*arguments: object, code: int = 0) -> dict[str, Any]:
    shown = lowlat("bench", *arguments)
    assert shown.exit_code == code, shown.output
    found: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
    return found


@pytest.mark.second
def test_the_bundled_pair_runs_and_its_file_keeps_the_schema(tmp_path: Path) -> None:
    strict = ("--device", "cpu", "--executor", "reference", "--perf-mode", "strict", "--quantize", "fp8")
    rounded = ("--draft-quantize", "fp8", "--repeats", 2)
    shown = last_line("run", "single", *SMALL, "-S", "0,3,auto", *strict, *rounded, "--out", tmp_path)
    found = read_result(tmp_path / "single.json")
    assert found.complete and not found.failures and shown["complete"] and shown["simulated"] == []
    assert [each["case"] for each in shown["rows"]] == ["1 x 40, S=0", "1 x 40, S=3", "1 x 40, S=auto"]
    plain, drafted, chosen = found.rows
    assert plain.eagle_speculation is None and plain.effective_accept_length == 1.0 and plain.num_steps == 8
    assert drafted.eagle_speculation is not None and drafted.eagle_speculation.num_drafts == 8
    written = json.loads((tmp_path / "single.json").read_text())["rows"]
    assert ["eagle_speculation" in row for row in written[:2]] == [False, True]
    assert len(plain.repeats) == 2 and plain.memory.host_peak_bytes > 10**8 and plain.memory.device_bytes is None
    assert plain.perf is not None and drafted.perf is not None and drafted.perf.undrafted_steps == {}
    assert 0 < plain.perf.library_calls < drafted.perf.library_calls and drafted.perf.copies == 0
    assert chosen.case.policy == "auto" and chosen.steps_by_width is not None and sum(chosen.steps_by_width) == 8
    assert shown["rows"][2]["mean_width"] == chosen.mean_width and "mean_width" not in shown["rows"][1]
    stats = chosen.eagle_speculation
    assert chosen.mean_width == (0 if stats is None else stats.total_draft_tokens) / 8
    environment = found.environment
    assert environment.perf_mode == "strict" and environment.quantize == "fp8"
    assert environment.speculator == "eagle3, head, draft_quantize fp8"
    assert (environment.model, environment.executor, environment.simulated) == ("bundled pair", "reference", ())
    assert environment.prompts == "prompts.json" and environment.distinct_prompt_tokens > 1000


@pytest.mark.wide
def test_any_way_to_speculate_is_measured(tmp_path: Path) -> None:
    """Trees, drafts from the text, SpecPV: options of a runtime are options of a measurement."""
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [1], [0, 0]]")
    specpv = ("--enable-specpv", "--specpv-partial-threshold", 64, "--specpv-n-retrieval-blocks", 2)
    ways: dict[str, tuple[object, ...]] = {
        "tree": ("-S", "0,2", "--tree", tree),
        "suffix": ("-S", 3, "--method", "suffix"),
        "specpv": ("-S", 3, "--context", 120, *specpv, "--specpv-n-window-blocks", 2, "--specpv-n-sink-blocks", 1),
    }
    for name, options in ways.items():
        draft = () if name == "suffix" else ("--draft-model", bundled("head"))
        common = ("--model", bundled("target"), *draft, *SMALL, "--repeats", 1, "--device", "cpu")
        shown = last_line("run", "batch", *common, *options, "--out", tmp_path / name)
        assert shown["complete"] and shown["rows"], name
        environment = read_result(tmp_path / name / "batch.json").environment
        assert all(word in environment.speculator for word in [name] if name in ("tree", "suffix", "specpv"))
    message = refusal("bench", "run", "batch", *common[:4], *SMALL, "--tree", tree, "--out", tmp_path / "no")
    assert "the tree is 2 deep but num_speculative_tokens is 3" in message or "2 deep" in message


def test_results_are_a_folder_or_a_file_that_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text("{}")
    for place in (file, tmp_path / "new" / "tiny.json", tmp_path, tmp_path / "new"):
        assert NEW_RESULTS.convert(place, None, None) == place
    for wrong in (file / "tiny.json", file / "new"):
        with pytest.raises(ConfigError, match=r"tiny\.json is"):
            NEW_RESULTS.convert(wrong, None, None)


@pytest.mark.wide
def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results" / "tiny.json"
    arguments = ("run", "single", *TINY, *SMALL, "-S", "0,3", "--repeats", 1, "--out", path, "--commit", "c")
    repeat, seen = CaseRun.repeat, []

    def interrupted(self: CaseRun) -> None:
        seen.append(self)
        if len(seen) == 2:
            raise KeyboardInterrupt
        repeat(self)

    monkeypatch.setattr(CaseRun, "repeat", interrupted)
    assert lowlat("bench", *arguments).exit_code == 130
    first = read_result(path)
    assert len(first.rows) == 1 and not first.complete
    assert last_line(*arguments)["complete"] and len(seen) == 3
    second = read_result(path)
    assert second.rows[0] == first.rows[0] and len(second.rows) == 2 and second.complete
    assert last_line(*arguments)["complete"] and len(seen) == 3, "nothing is left to measure"
    message = refusal("bench", *arguments, "--steps", 5)
    assert "holds rows of other conditions" in message and "steps: 4, 5" in message and "--fresh" in message
    assert "commit: 'c', 'd'" in refusal("bench", *arguments, "--commit", "d")


@pytest.mark.wide
def test_a_case_beyond_the_model_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    arguments = ("run", "baseline", *TINY, "--batch", 1, "--steps", 4, "--repeats", 1, "--out", tmp_path)
    shown = last_line(*arguments, "--context", "40,4096", code=1)
    assert len(shown["rows"]) == 1 and not shown["complete"]
    assert "the model" not in shown["failures"] and "and tiny has 2048" in shown["failures"]["1 x 4K, S=0"]
    message = refusal("bench", *arguments, "--context", 4096, "--fresh")
    assert "no case of baseline fits the 2048 positions of tiny" in message and "--context" in message


@pytest.mark.wide
def test_gates_open_the_large_suite_after_three_greens_in_a_row(tmp_path: Path) -> None:
    plan = tmp_path / "own.toml"
    plan.write_text(GATES.format(speed_up=0.01))
    common = (*TINY, "--file", plan, "--out", tmp_path / "out", "--commit", "c")
    large = ("run", "large-context", *common, *SMALL, "-S", 3, "--repeats", 1)
    first = last_line("gates", *common)
    assert first["green"] and first["in_a_row"] == {"small": 1} and "probability 0.75" in " ".join(first["simulated"])
    assert not first["accept_length_tested"] and not first["forced"]
    assert "small was green 1 of 3 times" in refusal("bench", *large)
    assert last_line("gates", *common, "--times", 2)["in_a_row"] == {"small": 3}
    plan.write_text(GATES.format(speed_up=1000))
    red = last_line("gates", *common, code=1)
    assert not red["green"] and red["in_a_row"] == {"small": 0} and red["gates"] == {"small": False}
    plan.write_text(GATES.format(speed_up=0.02))
    assert "small was green 0 of 3 times" in refusal("bench", *large), "a gate with another threshold is another gate"
    assert last_line(*large, "--force")["forced"]
    assert read_result(tmp_path / "out" / "large-context.json").forced
    plan.write_text(GATES.format(speed_up=0.01))
    path = tmp_path / "out" / "gates.json"
    state = read_struct(path, GateState)
    assert [each.green for each in state.runs] == [True, True, True, False]
    state.runs = state.runs[:1] * 3
    path.write_bytes(msgspec.json.encode(state))
    assert not last_line(*large, "--fresh")["forced"]
    assert "small was green 0 of 3 times" in refusal("bench", *large, "--fresh", "--temperature", 0.5)
    assert "has no gates of level full" in refusal("bench", "gates", *common, "--level", "full")
    message = refusal("bench", "gates", *TINY, "--level", "full", "--out", tmp_path / "out")
    assert "16k-batch-4 was green 0 of 3 times in a row" in message and "--level micro" in message


@pytest.mark.wide
def test_gates_of_experts_impose_their_own_acceptance_and_go_on_where_they_were_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "own.toml"
    small = GATES.format(speed_up=0.001).replace("needed = 3", "needed = 2")
    chosen = small.replace('"small"', '"chosen"').replace(
        "min_accept_length = 2.0", 'policy = "auto"\nmin_accept_length = 1.5'
    )
    plan.write_text(small + chosen)
    common = ("--geometry", "tiny-experts", "--device", "cpu", "--own-accept-length", "--file", plan, "--commit", "c")
    repeat, seen = CaseRun.repeat, []

    def interrupted(self: CaseRun) -> None:
        seen.append(self)
        if len(seen) == 7:
            raise KeyboardInterrupt
        repeat(self)

    monkeypatch.setattr(CaseRun, "repeat", interrupted)
    arguments = ("gates", *common, "--times", 2, "--missing", "--out", tmp_path)
    assert lowlat("bench", *arguments).exit_code == 130
    state = read_struct(tmp_path / "gates.json", GateState)
    assert [run.gates[0].name for run in state.runs] == ["chosen", "chosen"] and len(seen) == 7
    whole = last_line(*arguments)
    assert whole["in_a_row"] == {"small": 2, "chosen": 2} and whole["green"] and len(seen) == 9
    runs = read_struct(tmp_path / "gates.json", GateState).runs
    assert [run.gates[0].name for run in runs] == ["chosen", "chosen", "small", "small"]
    verdicts = [run.gates[0] for run in runs]
    assert all(each.bound and each.baseline_ms and not each.accept_tested for each in verdicts)
    assert [each.drafted_share is not None for each in verdicts] == [True, True, False, False]
    rows = read_result(tmp_path / "gate-small.json")
    assert "probability 0.543689" in " ".join(rows.environment.simulated) and not list(tmp_path.glob("*.1.json"))
    assert last_line(*arguments)["green"] and len(seen) == 9, "nothing is left to measure"
    message = refusal("bench", *arguments, "--simulated-acceptance", 0.5)
    assert "--own-accept-length and --simulated-acceptance" in message


@pytest.mark.second
def test_compare_and_report_read_what_run_wrote(tmp_path: Path) -> None:
    last_line("run", "stress", *TINY, *SMALL, "-S", 3, "--repeats", 2, "--out", tmp_path / "old")
    path, other = tmp_path / "old" / "stress.json", tmp_path / "new" / "stress.json"
    content = json.loads(path.read_text())
    repeats = content["rows"][0]["repeats"]
    repeats[1] = dict(repeats[0])  # a busy machine's two repeats may differ by any factor
    path.write_text(json.dumps(content))
    shutil.copytree(path.parent, other.parent)
    found = last_line("compare", path.parent, other.parent, "--tolerance", 0.01)
    assert found["compared"] == 5
    for repeat in repeats:
        repeat["tokens_per_s"] /= 2
    other.write_text(json.dumps(content))
    worse = last_line("compare", path, other, "--tolerance", 0.4, code=1)
    assert worse["regressions"] == ["stress: 1 x 40, S=3: tokens_per_s"]
    shown = lowlat("bench", "report", tmp_path / "old", "--no-plots")
    assert shown.exit_code == 0 and (tmp_path / "old" / "report.html").read_text().startswith("<!doctype html>")
    assert "1 x 40, S=3" in (tmp_path / "old" / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "singel"], "no scenario 'singel'; known: baseline, single, batch"),
        (["run", "single", "--geometry", "llama"], "'llama' is none of tiny, tiny-experts, smollm2-135m, llama-8b"),
        (["run", "single", "--geometry", "tiny", "--model", "some/model"], "one of --model and --geometry"),
        (["run", "single", "--batch", "33"], "<= 32"),
        (["run", "single", "--steps", "0"], ">= 1"),
        (["run", "single", "--model", "some/model", "--draft-window", "5"], "need a draft model (--draft-model DIR)"),
        (["run", "batch", "--geometry", "tiny", "--device", "cpu", "--profile"], "a profile needs an NVIDIA GPU"),
        (["compare", "none", "none"], "none: no such file or directory"),
        (["report", "."], "no results of `lowlat bench run` are here"),
    ],
)
def test_wrong_options_are_refused_by_name(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal("bench", *arguments)


def test_depth_without_a_draft_model_is_refused_before_a_load(tmp_path: Path) -> None:
    message = refusal("bench", "run", "single", "--model", bundled("target"), *SMALL, "--out", tmp_path)
    assert "S = 2 needs a draft model" in message and not list(tmp_path.iterdir())
