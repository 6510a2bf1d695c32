"""Scenarios, gates, comparisons and reports: what TOML declares, what a case measures, what is made of results."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from bench_cases import environment, result, row
from profiling_cases import cover, record_of
from tiny_models import make_target

from lowlat.cli.options import bundled
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError, LowlatError
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.default_length import default_lengths
from lowlat.step.variants import bodies_of, choice_bucket
from lowlat.tools.bench.compare import compare_results
from lowlat.tools.bench.gates import (
    GateRun,
    GateState,
    Verdict,
    check_gates,
    default_length,
    judge,
    read_state,
    standing,
)
from lowlat.tools.bench.geometry import RandomWeights, random_target, read_geometries
from lowlat.tools.bench.measure import CaseRun, room_of
from lowlat.tools.bench.prompts import Prompts
from lowlat.tools.bench.report.pages import StageProfile, make_report
from lowlat.tools.bench.report.plots import plain_svg
from lowlat.tools.bench.results import GATES_OWN, read_results, write_struct
from lowlat.tools.bench.runtimes import Need, Runtimes
from lowlat.tools.bench.scenarios import Case, Gate, Scenario, read_plan
from lowlat.tools.bench.step_bytes import attended, program_bytes, step_bytes, weight_sizes
from lowlat.tools.draft_model.random_models import write_draft_model
from lowlat.tools.profile import recording

PLAIN, DRAFTED = Case(8192, 1, 0), Case(8192, 1, 3)


def test_the_shipped_plan_has_the_suites_and_gates_by_name() -> None:
    plan = read_plan()
    assert list(plan.scenarios) == ["baseline", "single", "batch", "large-context", "stress"]
    single = plan.scenario("single")
    assert single.contexts == (8192, 16384, 32768, 65536) and single.num_speculative_tokens == (0, 2, 3, 4, 5, 7)
    assert [name for name, each in plan.scenarios.items() if each.gated] == ["large-context"]
    cases = plan.scenario("large-context").cases()
    assert len(set(cases)) == len(cases) == 72 and cases[0] == Case(65536, 8, 0)
    asked = {
        (g.level, g.target, g.policy): (g.needed, g.min_speed_up, g.min_accept_length, g.experts_bound_share)
        for experts in (False, True)
        for level in ("micro", "full")
        for g in plan.gates_of(level, experts)
        if (g.context, g.batch) == (16384, 4)
    }
    assert asked == {
        ("micro", "dense", "fixed"): (3, 1.0, 2.2, None), ("full", "dense", "fixed"): (1, 1.0, 2.2, None),
        ("micro", "experts", "fixed"): (3, 1.0, 2.5, None), ("full", "experts", "fixed"): (1, 1.0, 2.5, None),
        ("micro", "experts", "auto"): (3, 1.05, 2.2, None),
    }  # fmt: skip
    single_slot = [g for g in plan.gates if (g.context, g.batch) == (32768, 1)]
    assert [(g.target, g.min_speed_up, g.min_accept_length, g.experts_bound_share) for g in single_slot] == [
        ("dense", 2.0, 3.0, None), ("experts", 1.5, 3.0, 0.9), ("dense", 2.0, 3.0, None), ("experts", 1.5, 3.0, 0.9),
    ]  # fmt: skip
    for gate in (gate for gate in plan.gates if gate.level == "full"):  # the whole of a scenario's rows
        assert set(gate.scenario().num_speculative_tokens) == set(single.num_speculative_tokens)
    (chosen,) = (gate for gate in plan.gates if gate.policy == "auto")
    assert chosen.min_drafted_share == 0.9 and chosen.judged in chosen.scenario().cases()


@pytest.mark.parametrize(
    ("name", "changes", "asked"),
    [
        ("large-context", {}, "own shipped"),
        ("single", {}, "shipped"),
        ("single", {"contexts": (8192,)}, ""),
        ("batch", {"contexts": (8192, 16384)}, "shipped"),
        ("baseline", {}, ""),  # no drafts
        ("stress", {}, ""),
        ("mine", {}, "shipped"),
        ("mine", {"contexts": (64,)}, ""),
        ("mine", {"contexts": (64,), "gated": True}, "own"),
        ("mine", {"gated": True}, "own shipped"),
        ("large-context", {"contexts": (64,)}, "own"),
    ],
)
def test_a_scenario_asks_for_gates_by_what_it_measures(
    name: str, changes: dict[str, Any], asked: str, tmp_path: Path
) -> None:
    """Whatever its name, and whatever gates a file of one's own has."""
    own = tmp_path / "own.toml"
    own.write_text(
        "[scenarios.mine]\ncontexts = [65536]\nbatches = [1]\nnum_speculative_tokens = [3]\n"
        '[[gates]]\nname = "toy"\ncontext = 64\nbatch = 1\nnum_speculative_tokens = 1\nsteps = 1\n'
        "min_speed_up = 0.001\nmin_accept_length = 0.001\n"
    )
    plan = read_plan(own)
    scenario = msgspec.structs.replace(plan.scenario(name), **changes)
    for experts, target in ((False, "dense"), (True, "experts")):
        shipped = [gate.name for gate in read_plan().gates if gate.target == target]
        names = {"own": [gate.name for gate in plan.gates], "shipped": shipped}
        wanted = [each for kind in asked.split() for each in names[kind]]
        assert [gate.name for gate in plan.gates_for(scenario, experts)] == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[scenarios.a]\ncontexts=[1]\nbatches=[33]\nnum_speculative_tokens=[0]", "<= 32"),
        ("[scenarios.a]\ncontexts=[]\nbatches=[1]\nnum_speculative_tokens=[0]", "length >= 1"),
        ("[scenarios.a]\ncontext=[1]\nbatches=[1]\nnum_speculative_tokens=[0]", "unknown field `context`"),
        ("[scenarios.'../a']\ncontexts=[1]\nbatches=[1]\nnum_speculative_tokens=[0]", "names of letters"),
        ("nonsense", "own.toml"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_plan(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runtime, Runtime]]:
    """The tiny geometry without and with its draft model, three drafts deep, of which 2.5 tokens a step come."""
    scratch = tmp_path_factory.mktemp("tiny")
    geometry = read_geometries()["tiny"]
    target = random_target(geometry, scratch / "target")
    head = write_draft_model(geometry, target.config, scratch / "head")
    draft = SpeculativeConfig(model=head, num_speculative_tokens=3, strict=True, simulated_accept_length=2.5)
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 512, "device": "cpu"}
    with Runtime.load(target, **sizes) as plain, Runtime.load(target, draft, **sizes) as drafting:
        yield plain, drafting


@pytest.mark.wide
def test_every_geometry_parses_and_its_bytes_are_the_published_ones(tmp_path: Path) -> None:
    sizes = {}
    for name, geometry in read_geometries().items():
        target = random_target(geometry, tmp_path / name)
        weights = target.weights
        sizes[name] = sum(t.numel() * t.element_size() for t in weights.shapes().values()) / 1e9
        if name.startswith("tiny"):
            assert isinstance(weights, RandomWeights)
            found = {names[0]: tensor for names, tensor in weights.stream()}
            assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
                n: (t.shape, t.dtype) for n, t in weights.shapes().items()
            }
            name = next(name for name in found if name.startswith("layers.1."))
            assert torch.equal(found[name], weights[name])
            assert not torch.equal(found[name], found[name.replace("layers.1.", "layers.2.")])
    assert sizes["llama-8b"] == pytest.approx(16.06, abs=0.01)
    assert sizes["gpt-oss-120b"] == pytest.approx(65.25, abs=0.01)
    assert sizes["qwen3.5-9b"] == pytest.approx(17.91, abs=0.01)
    assert sizes["qwen3.5-27b"] == pytest.approx(53.79, abs=0.01)
    assert sizes["qwen3.6-35b-a3b"] == pytest.approx(69.32, abs=0.01)
    assert sizes["qwen3-coder-next"] == pytest.approx(159.35, abs=0.01)
    assert sizes["qwen3-30b-a3b"] == pytest.approx(61.06, abs=0.01)


@pytest.mark.parametrize(
    ("length", "options", "expected"),
    [
        (101, {}, 100), (101, {"first": 1}, 99), (101, {"window": 30}, 30), (101, {"window": 30, "keep_first": 4}, 34),
        (21, {"window": 30, "keep_first": 4}, 20), (1, {}, 0), (0, {"window": 3}, 0),
    ],
)  # fmt: skip
def test_attention_reads_what_lies_in_its_window(length: float, options: dict[str, int], expected: float) -> None:
    assert attended(length, **options) == expected


@pytest.mark.second
def test_a_case_measures_steps_tokens_and_acceptance(tiny: tuple[Runtime, Runtime]) -> None:
    runtime, case = tiny[1], Case(200, 2, 3)
    scenario = Scenario((200,), (2,), (3,), steps=8, warm_up=2, repeats=2, reuse_prompts=True)
    run = CaseRun(runtime, case, scenario, Prompts.random(160), wall_gb_per_s=2.0)
    for _ in range(scenario.repeats):
        run.repeat()
    found = run.row()
    assert not runtime.busy
    assert found.num_steps == 16 and (found.active_slots.min, found.active_slots.max) == (2, 2)
    stats = found.eagle_speculation
    assert stats is not None and stats.simulated and stats.num_drafts == 32
    assert found.num_tokens == stats.total_accepted_tokens + 32
    assert found.effective_accept_length == pytest.approx(stats.mean_acceptance_length)
    assert found.ms_per_token.count == found.num_tokens
    assert found.ms_per_token.mean == pytest.approx(2e3 / found.tokens_per_s, rel=1e-3)
    assert found.mean_context > 200 and found.simulated_accept_length == 2.5
    assert found.floor_ms == found.bytes_per_step / 2.0 / 1e6
    assert found.time_to_first_token_ms is not None and found.time_to_first_token_ms.count == 2  # the first repeat's


def test_a_soak_s_repeats_bring_the_same_tokens_in_a_cache_that_is_nearly_full(
    tiny: tuple[Runtime, Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, drafting = tiny
    case, scenario = Case(24, 2, 3), Scenario((24,), (2,), (3,), steps=4, warm_up=1, repeats=3, alike=True)
    run = CaseRun(drafting, case, scenario, Prompts.random(160))
    for _ in range(2):
        run.repeat()
    run._first[1][5] += 1
    with pytest.raises(LowlatError, match=r"2 x 24, S=3: repeat 3 brought request 1 other tokens .* from token 5 on"):
        run.repeat()
    need = Need(3, 2, 100, False, kv_share=0.75)
    assert need.blocks == math.ceil(2 * 6 / 0.75) and Need(3, 2, 100, False).blocks == 12
    made: list[dict[str, Any]] = []

    class Loads:
        def load(self, depth: int, **sizes: Any) -> Any:
            made.append(sizes)
            config = SimpleNamespace(**{name: sizes[name] for name in ("max_batch", "max_context", "kv_blocks")})
            ladder = SimpleNamespace(rows_of={3: 4}, adaptive=False)
            return SimpleNamespace(
                config=config, ladder=ladder, speculator=1, speculate=lambda _: None, close=lambda: None
            )

    smaller = need._replace(batch=1)
    runtimes = Runtimes(Loads(), [need, need, smaller])  # type: ignore[arg-type]
    for each in (need, need, smaller):
        runtimes.take(each)
    assert [sizes["kv_blocks"] for sizes in made] == [17, 9], "each has as much free as it asks for"


def test_churn_ends_every_request_and_leaves_nothing(tiny: tuple[Runtime, Runtime]) -> None:
    runtime, case = tiny[0], Case(40, 2, 0)
    scenario = Scenario((40,), (2,), (0,), steps=12, warm_up=2, repeats=1, traffic="churn")
    before = runtime.summary()["finish_reasons"].get("cancelled", 0)
    run = CaseRun(runtime, case, scenario, Prompts.random(160))
    run.repeat()
    found, after = run.row(), runtime.summary()["finish_reasons"]
    assert (after["length"], after["cancelled"] - before) == (7, 1 + 2)  # every eighth; and two that warmed up
    assert not runtime.busy and not runtime.slots()
    assert found.active_slots.max == 2 and found.num_tokens >= 7 * (12 // 4)
    assert room_of(case, scenario, device_loop=True) > 512


@pytest.mark.second
def test_a_case_is_profiled_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = bundled("target"), bundled("head")
    case = Case(30, 1, 3)
    draft = SpeculativeConfig(model=head, num_speculative_tokens=3, strict=True)
    with Runtime.load(target, draft, max_batch=1, max_context=512, device="cpu") as runtime:
        groups, bucket = cover(runtime, target, head), runtime.ladder.choose(1, 3)
        monkeypatch.setattr(runtime.executor, "groups", groups, raising=False)
        monkeypatch.setattr(recording, "record_kernels", record_of(groups, bucket, recording.LEAD + 2))
        scenario = Scenario((30,), (1,), (3,), steps=40)
        figures = CaseRun(runtime, case, scenario, Prompts.random(4096), wall_gb_per_s=4000.0).profile(2)
        assert not runtime.busy
    found = msgspec.convert({**figures, "model": "m", "card": "A GPU"}, StageProfile)
    assert found.step_us == pytest.approx(sum(stage.time_us or 0.0 for stage in found.stages))
    assert "BASE_DECODE_STEP" in [stage.stage for stage in found.stages if stage.share_of_wall]


def test_prompts_are_cut_from_the_text_and_begin_differently(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text("[[1, 2, 3], [4, 5, 6, 7]]")
    prompts = Prompts.read(path, None, 160)
    ring = [1, 2, 3, 4, 5, 6, 7]
    found = prompts.of(Case(10, 2, 3))
    for each in found:
        start = each[0] - 1
        assert each == [ring[(start + place) % 7] for place in range(10)]
    assert found == prompts.of(Case(10, 2, 0)), "the same at every depth"
    first, second = Prompts.random(160).of(Case(1000, 2, 3))
    assert first[:100] != second[:100] and Prompts.random(160).some([100, 30]) == [first[:100], second[:30]]
    path.write_text("[160]")
    with pytest.raises(ConfigError, match="0 to 159"):
        Prompts.read(path, None, 160)
    path.write_text('["text"]')
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Prompts.read(path, None, 160)


GATE = Gate("g", 8192, 1, 3, 10, min_speed_up=2.0, min_accept_length=2.4, experts_bound_share=0.9)


@pytest.mark.parametrize(
    ("ms", "accept", "drafted_bytes", "moe", "green"),
    [
        (5.0, 2.5, 10**10, False, True),  # 2.05 x
        (6.0, 2.5, 10**10, False, False),
        (5.0, 2.3, 10**10, False, False),  # too few accepted
        (5.0, 2.5, 2 * 10**10, True, True),  # bound 1.25, of which 1.125 is asked for: the threshold stays 2.0
        (6.0, 2.5, 2 * 10**10, True, False),
        (5.0, 2.5, 10**10, True, False),  # bound 2.5: 2.25 is asked for
    ],
)
def test_a_gate_is_judged_by_speed_acceptance_and_bound(
    ms: float, accept: float, drafted_bytes: int, moe: bool, green: bool
) -> None:
    rows = row(PLAIN, [4.1]), row(DRAFTED, [ms], accept=accept, bytes_per_step=drafted_bytes)
    verdict = judge(GATE, result(*rows), moe=moe)
    assert verdict.green is green and (verdict.bound is not None) is moe and verdict.accept_tested
    assert (verdict.baseline_over_floor, verdict.drafted_over_floor) == (4.1 / 2.5, ms / 2.5)
    assert not judge(GATE, result(rows[0]), moe=moe).green


def test_an_accept_length_that_was_imposed_is_not_tested() -> None:
    drafted = row(DRAFTED, [4.0], accept=2.3, simulated_accept_length=2.3)  # 2.4 is asked for
    verdict = judge(GATE, result(row(PLAIN, [4.1]), drafted), moe=False)
    assert verdict.green and not verdict.accept_tested


@pytest.mark.parametrize(("undrafted", "green"), [(3, True), (4, False)])
def test_a_gate_of_chosen_lengths_asks_for_steps_with_drafts(undrafted: int, green: bool) -> None:
    gate = msgspec.structs.replace(GATE, policy="auto", min_drafted_share=0.9, min_accept_length=9.0)
    chosen = row(Case(8192, 1, 7, "auto"), [4.0], steps_by_width=[undrafted, 30 - undrafted])
    verdict = judge(gate, result(row(PLAIN, [4.1]), chosen), moe=False)
    assert verdict.green is green and not verdict.accept_tested and verdict.drafted_share == 1 - undrafted / 30


def test_an_acceptance_of_gates_own_holds_for_every_imposed_one() -> None:
    weights, imposed = "weights: random", "acceptance: each draft with probability 0.6, imposed"
    own = environment(simulated=(weights, GATES_OWN))
    assert own.holds_for(environment(simulated=(weights, imposed))) and own.holds_for(own)
    assert not own.holds_for(environment(simulated=(weights,))) and not own.holds_for(environment(simulated=(imposed,)))
    assert not own.holds_for(environment(simulated=(weights, imposed), commit="other"))
    assert not environment(simulated=(weights, imposed)).holds_for(own)


def test_greens_count_in_a_row_for_the_same_gate_and_conditions_alone() -> None:
    state = GateState()
    toy = msgspec.structs.replace(GATE, min_speed_up=0.1)

    def add(green: bool, gate: Gate = GATE, **others: str) -> int:
        verdict = Verdict(name=gate.name, green=green, gate=gate, required_speed_up=1.0, required_accept_length=1.0)
        state.runs.append(GateRun(green=green, environment=environment(**others), gates=(verdict,)))
        return standing(state, environment(), GATE).in_a_row

    assert [add(True), add(True), add(False, commit="other"), add(True), add(False), add(True)] == [1, 2, 2, 3, 0, 1]
    assert [add(True, toy), add(False, toy), add(True), add(True), add(True)] == [1, 1, 2, 3, 3]
    unnamed = Verdict(name="g", green=True, required_speed_up=1.0, required_accept_length=1.0)
    old = GateState(runs=[GateRun(green=True, environment=environment(), gates=(unnamed,))] * 5)
    assert standing(old, environment(), GATE).in_a_row == 0


@pytest.mark.parametrize(
    ("auto", "fixed", "decided"), [(3, 0, "auto"), (3, 2, "auto"), (3, 3, 3), (2, 0, 3), (0, 0, 3), (0, 3, 3)]
)
def test_gates_of_experts_decide_for_the_draft_length_where_none_is_asked_for(
    auto: int, fixed: int, decided: int | str
) -> None:
    gates = read_plan().gates_of("micro", experts=True)
    greens = {"auto": auto, "fixed": fixed}
    runs = []
    for gate in gates:
        verdict = Verdict(name=gate.name, green=True, gate=gate, required_speed_up=1.0, required_accept_length=1.0)
        runs += [GateRun(green=True, environment=environment(), gates=(verdict,))] * greens[gate.policy]
    assert default_length(GateState(runs=runs), environment(), gates) == decided


def test_the_default_draft_length_is_what_committed_gates_decide_for() -> None:
    found: set[int | str] = set()
    for path in sorted((Path(__file__).parents[2] / "bench" / "results").rglob("gates.json")):
        state, gates = read_state(path.parent), read_plan().gates_of("micro", experts=True)
        judged = [run for run in state.runs if any(verdict.gate in gates for verdict in run.gates)]
        found |= {default_length(state, run.environment, gates) for run in judged[-1:]}
    assert (found or {3}) == {default_lengths()["experts"]}, "write lowlat/speculators/default_lengths.json"


def test_what_was_forced_marks_all_that_follows() -> None:
    verdict = Verdict(name="g", green=True, gate=GATE, required_speed_up=1.0, required_accept_length=1.0)
    runs = [GateRun(green=True, environment=environment(), gates=(verdict,), forced=number == 0) for number in range(4)]
    with pytest.raises(ConfigError, match=r"mine needs green gates .* g was green 0 of 3 times in a row"):
        check_gates("mine", [GATE], GateState(), environment())
    assert check_gates("mine", [GATE], GateState(), environment(), force=True)
    assert check_gates("mine", [GATE], GateState(runs=runs[:3]), environment())
    assert not check_gates("mine", [GATE], GateState(runs=runs), environment())  # the last three were not
    assert not check_gates("mine", [], GateState(), environment())


@pytest.mark.parametrize(
    ("old", "new", "judgement"),
    [
        ((4.0, 4.0, 4.0), (4.2, 4.2, 4.2), "regression"),
        ((4.0, 4.0, 4.0), (4.06, 4.06, 4.06), "same"),  # within the tolerance
        ((3.5, 4.0, 4.5), (3.8, 4.2, 4.7), "same"),  # within the noise
        ((3.5, 4.0, 4.5), (8.0, 8.4, 8.8), "regression"),
        ((4.0, 4.01, 4.0), (3.0, 3.01, 3.0), "improvement"),
        ((4.0,), (4.2,), "regression"),  # of noise nothing is known
    ],
)
def test_a_difference_counts_beyond_noise_and_tolerance(
    old: tuple[float, ...], new: tuple[float, ...], judgement: str
) -> None:
    found = compare_results({"a": result(row(DRAFTED, old))}, {"a": result(row(DRAFTED, new))}, tolerance=0.02)
    by_name = {each.metric: each for each in found}
    assert by_name["ms_per_step_p50"].judgement == by_name["tokens_per_s"].judgement == judgement
    assert by_name["accept_length"].judgement == "same"
    assert (by_name["tokens_per_s"].noise is None) == (len(old) == 1)


def test_results_of_other_conditions_are_not_compared() -> None:
    old, new = result(row(PLAIN)), result(row(PLAIN))
    new.environment = environment(gpu="Another")
    with pytest.raises(ConfigError, match="gpu: 'A GPU', 'Another'"):
        compare_results({"a": old}, {"a": new}, tolerance=0.0)
    assert compare_results({"a": old}, {"a": new}, tolerance=0.0, force=True)
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare_results({"a": old}, {"b": new}, tolerance=0.0)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A directory with a result, a profile and a file of another kind."""
    rows = [
        row(msgspec.structs.replace(case, context=context)) for context in (8192, 16384) for case in (PLAIN, DRAFTED)
    ]
    write_struct(tmp_path / "single.json", result(*rows, forced=True))
    stages = '[{"stage": "PUBLISH", "time_us": 3.0, "share": 0.1, "share_of_wall": 0.5}]'
    (tmp_path / "profile.json").write_text(
        '{"model": "m", "card": "A GPU", "batch": 1, "num_speculative_tokens": 3, "contexts": [8192], '
        f'"step_us": 30.0, "stages": {stages}}}'
    )
    (tmp_path / "other.json").write_text("[1]")
    return tmp_path


def check_alone(page: str) -> None:
    """A page loads nothing, and shows nothing unescaped."""
    assert not re.search(r"https?:|//|<script|<link|<img|@import|url\((?!#)", page.replace("http-equiv", ""))
    assert "m<1>" not in page and "m&lt;1&gt;" in page


def test_the_report_shows_tables_and_conditions_without_another_host(results: Path) -> None:
    pages = make_report(results, plots=False)
    check_alone(pages.html)
    for text in (pages.html, pages.markdown):
        assert "Run by force" in text and "1 x 16K, S=3" in text and "2.50 x" in text and "PUBLISH" in text
        assert "commit abc" in text and "simulated: nothing" in text
    assert list(read_results(results)) == ["single"]
    with pytest.raises(ConfigError, match="none: cannot be read"):
        make_report(results / "none")


@pytest.mark.wide
def test_the_report_draws_its_plots_into_the_page(results: Path) -> None:
    pytest.importorskip("matplotlib")
    page = make_report(results).html
    check_alone(page)
    assert page.count("<svg") == 6 and "bound by bytes" in page and "p99.9" in page
    assert make_report(results).html == page, "the same figures make the same page"


def test_an_svg_is_left_without_what_names_another_host() -> None:
    prologue, metadata = '<?xml version="1.0"?><!DOCTYPE svg "http://a">', "<metadata>http</metadata>"
    svg = f'{prologue}<svg xmlns:x="http://b" w="1">{metadata}<g/></svg>\n'
    assert plain_svg(svg, "t") == '<svg role="img" aria-label="t" w="1"><g/></svg>'


def test_a_shared_expert_is_read_once(tmp_path: Path) -> None:
    """Those that rows chose include it; where all are chosen a step reads all, and of fewer each one's bytes less."""
    make_target(tmp_path, "qwen3_5_moe_text", seed=3)
    with Runtime.load(tmp_path, device="cpu", max_batch=2, max_context=128) as runtime:
        experts, bucket = runtime.model_config.experts, runtime.ladder.choose(2, 0)
        assert experts is not None and experts.shared == 1
        program, lengths = runtime.executor.program(bucket), [20.0, 20.0]
        sizes = weight_sizes(runtime.model_config, None, runtime.rank_config)
        whole = program_bytes(program, sizes, lengths, 1.0)
        none = program_bytes(program, sizes, lengths, 0.0)
        one = (whole - none) / experts.num_matrices
        for count in (2.0, 4.5, float(experts.num_matrices)):
            assert step_bytes(runtime, bucket, lengths, count) == pytest.approx(none + count * one, abs=2)
        assert step_bytes(runtime, bucket, lengths, float(experts.num_matrices)) == whole
        recording.start_decoding(runtime, recording.random_prompts(97, 2, 20), 8)
        runtime.step()
        assert experts.num_taken <= recording.chosen_experts(runtime, bucket) <= experts.num_matrices


def test_experts_are_counted_of_the_body_that_ran_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was launched ahead chooses another length while it is waited for: its scratch is what there is."""
    state, bucket, counted = {"draft_length_choice": torch.tensor(0)}, choice_bucket(2, 3), list[Any]()
    executor = SimpleNamespace(state=state, synchronize=lambda: state["draft_length_choice"].fill_(2))
    scheduler = SimpleNamespace(num_active=2, choose_bucket=lambda depth: bucket)
    runtime: Any = SimpleNamespace(
        model_config=SimpleNamespace(experts=object()), scheduler=scheduler, executor=executor, num_speculative_tokens=3
    )

    def chosen(runtime: Any, bucket: Any) -> float:
        counted.append(bucket)
        return 1.0

    monkeypatch.setattr(recording, "chosen_experts", chosen)
    case: Any = SimpleNamespace(_runtime=runtime, _experts=[])
    CaseRun._count_experts(case)
    assert counted == [bodies_of(bucket)[2]] and case._experts == [1.0]
