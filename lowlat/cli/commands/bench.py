"""`lowlat bench run|gates|compare|report`: measured scenarios, the gates before them, and what is made of results."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lowlat.cli.console import print_json, print_table, progress_bar
from lowlat.cli.help import SectionedCommand, SectionedGroup
from lowlat.cli.options import IntegerList, bundled, given_options, record_options
from lowlat.cli.paths import FILE, FOLDER, MODEL, NEW_FOLDER, NEW_RESULTS, PLACE
from lowlat.errors import ConfigError
from lowlat.options.declaration import options_of
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from lowlat.tools.bench.gates import Verdict
    from lowlat.tools.bench.results import Environment, Failure, Result, Row
    from lowlat.tools.bench.scenarios import Level, Scenario
    from lowlat.tools.bench.subject import Subject

__all__ = ["command", "compare", "gates", "report", "run"]

F = TypeVar("F", bound=Callable[..., Any])
VERDICT_COLUMNS = (
    *("gate", "state", "speed-up", "asked for", "bound", "accept length", "asked for", "drafted"),
    *("S = 0, ms over its floor", "drafted", ""),
)
ROW_COLUMNS = ("case", "ms p50", "ms p99", "first token, ms", "tokens/s", "accept length", "of the wall")
# -S gives draft lengths and whether they are chosen; an acceptance that is the same at all of them is a probability
SPECULATION = tuple(
    option.key
    for option in options_of(SpeculativeConfig)
    if not option.python_only
    and option.name not in ("num_speculative_tokens", "adaptive_width", "strict", "simulated_accept_length")
)
RUNNING = (
    *("device", "dtype", "executor", "device_loop", "perf_mode", "max_prefill_chunks"),
    *("quantize", "quantize_lm_head", "kv_cache_dtype", "activations", "tensor_parallel_size"),
    *("check", "on_failed_check", "count_tiles"),
)


@click.group("bench", cls=SectionedGroup)
def command() -> None:
    """Measure scenarios, hold them against gates, compare two results, and make a report of them."""


def _out_option(place: click.Path) -> Callable[[F], F]:
    """The option that says where the results go."""
    default = Path("bench-results")
    return click.option("--out", type=place, default=default, show_default=True, metavar="DIR", help="Results.")


def _subject_options(function: F) -> F:
    """Add what is measured."""
    options = [
        click.option(
            "--model",
            type=MODEL,
            metavar="MODEL",
            help="A target's directory or name.  [default: the bundled pair]",
        ),
        click.option("--geometry", metavar="NAME", help="Random weights of a published shape, in place of --model."),
        click.option(
            "--draft-vocabulary",
            "vocabulary",
            type=click.Choice(["cut", "whole"]),
            default="cut",
            metavar="IDS",
            help="Ids drafted: cut (the shape's) or whole.  [default: cut]",
        ),
        record_options(SpeculativeConfig, *SPECULATION),
        click.option(
            "--prompts",
            type=FILE,
            metavar="FILE",
            help="Text, or .json of texts or token ids, to cut prompts from.  [default: the bundled pair's own; else "
            "random tokens]",
        ),
        click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0: greedy."),
        record_options(RuntimeConfig, *RUNNING),
        click.option(
            "--file", "plan_file", type=FILE, metavar="FILE", help="Scenarios and gates of your own, in TOML."
        ),
        click.option("--commit", default="", help="What is measured, where git has no checkout."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@command.command("run", cls=SectionedCommand)
@click.argument("scenario")
@click.option("--context", type=IntegerList(), metavar="N,N", help="Contexts in place of the scenario's.")
@click.option("--batch", type=IntegerList(), metavar="N,N", help="Batches in place of the scenario's.")
@click.option(
    "-S",
    "--num-speculative-tokens",
    "depths",
    type=IntegerList(words=("auto",)),
    metavar="N,N",
    help="Depths of speculation in place of its own; auto: each step chooses.",
)
@click.option("--steps", type=int, metavar="N", help="Timed steps of a repeat, in place of the scenario's.")
@click.option("--warm-up", type=int, metavar="N", help="Steps before them.")
@click.option("--repeats", type=int, metavar="N", help="Repeats of each case.")
@click.option("--fresh", is_flag=True, help="Begin again where there are results already.")
@click.option("--force", is_flag=True, help="Run without the gates that it asks for; the result says so.")
@click.option(
    "--gates",
    "gates_folder",
    type=NEW_FOLDER,
    metavar="DIR",
    help="Where its gates were run.  [default: that of --out]",
)
@click.option("--profile", is_flag=True, help="Write the time of each stage, too: needs an NVIDIA GPU.")
@_subject_options
@_out_option(NEW_RESULTS)
def run(
    scenario: str,
    out: Path,
    fresh: bool,
    force: bool,
    profile: bool,
    plan_file: Path | None,
    gates_folder: Path | None,
    **values: Any,
) -> None:
    """Measure SCENARIO: baseline, single, batch, large-context, stress, or one of your own (--file).

    Rows are written as they are made: a run that was interrupted goes on where it ended. An --out that ends in .json is
    the file itself. The last line on stdout is a summary in JSON. Exit code 1 where a case could not be measured.
    """
    from lowlat.tools.bench.scenarios import read_plan

    plan = read_plan(plan_file)
    chosen = _overridden(plan.scenario(scenario), values)
    with _subject(values, drafts=chosen.drafts) as subject:
        from lowlat.tools.bench.gates import check_gates, read_state
        from lowlat.tools.bench.run import ScenarioRun

        environment = subject.environment(values["commit"])
        path = out if out.suffix == ".json" else out / f"{scenario}.json"
        asked = plan.gates_for(chosen, subject.config.experts is not None)
        forced = check_gates(scenario, asked, read_state(gates_folder or path.parent), environment, force=force)
        prepared = ScenarioRun(
            scenario, chosen, subject, path, fresh=fresh, forced=forced, commit=values["commit"], profile=profile
        )
        if prepared.num_done:
            click.echo(f"{prepared.num_done} cases are in {path} already", err=True)
        with progress_bar(scenario) as update:
            result = prepared.run(_tell, update)
    _show(result)
    print_json(_summary(result, path))
    raise click.exceptions.Exit(1 if result.failures else 0)


@command.command("gates", cls=SectionedCommand)
@click.option(
    "--level",
    type=click.Choice(["micro", "full"]),
    default="micro",
    show_default=True,
    help="micro: a few steps; full: whole scenarios, when the micro gates are green.",
)
@click.option("--times", type=click.IntRange(1, 20), default=1, show_default=True, help="Rounds of all gates.")
@click.option(
    "--missing",
    is_flag=True,
    help="Of these only as many rounds of a gate as it lacks to be green as often in a row as it needs.",
)
@click.option("--own-accept-length", "imposes", is_flag=True, help="Impose the accept length that each gate asks for.")
@click.option("--force", is_flag=True, help="Measure full gates whose micro gates are not green; the state says so.")
@_subject_options
@_out_option(NEW_FOLDER)
def gates(
    level: "Level",
    out: Path,
    plan_file: Path | None,
    times: int,
    missing: bool,
    imposes: bool,
    force: bool,
    **values: Any,
) -> None:
    """Measure the gates of a level, which drafts at long contexts ask for under the same conditions.

    An accept length that is imposed is not tested. Rows and verdicts are written as they are made: gates that were
    interrupted go on where they ended. Exit code 1 where a gate is not green. The last line on stdout is a summary in
    JSON.
    """
    from lowlat.tools.bench.gates import (
        check_gates,
        default_length,
        gates_environment,
        read_state,
        run_gates,
        standing,
    )
    from lowlat.tools.bench.scenarios import read_plan

    if imposes and values["simulated_acceptance"] is not None:
        raise click.UsageError("--own-accept-length and --simulated-acceptance both impose acceptance")
    plan = read_plan(plan_file)
    with _subject(values, drafts=True) as subject, progress_bar("gates") as update:
        experts = subject.config.experts is not None
        asked, before = plan.gates_of(level, experts), plan.gates_of("micro", experts) if level == "full" else []
        if not asked:
            raise ConfigError(f"{plan_file or 'the plan'} has no gates of level {level}")
        environment = gates_environment(subject, values["commit"], imposes=imposes)
        forced = check_gates("the full gates", before, read_state(out), environment, force=force)
        rounds = run_gates(
            asked, subject, out, times=times, only_missing=missing, imposes=imposes, commit=values["commit"],
            forced=forced, report=_tell, progress=update,
        )  # fmt: skip
    verdicts = [verdict for each in rounds for verdict in each.gates]
    _show_verdicts(f"{level} gates of {environment.model}", verdicts)
    _show_simulated(environment)
    state = read_state(out)
    standings = [standing(state, environment, gate) for gate in asked]
    for each in standings:
        click.echo(f"{each.gate.name}: green {each.in_a_row} times in a row, {each.gate.needed} needed")
    decided = {}
    if {each.policy for each in asked} == {"fixed", "auto"}:
        decided = {"default_length": default_length(state, environment, asked)}
        click.echo(f"draft length where none is asked for, by these gates: {decided['default_length']}")
    greens = {
        each.gate.name: all(verdict.green for verdict in verdicts if verdict.name == each.gate.name)
        and (not missing or each.green)
        for each in standings
    }
    summary = {
        "green": all(greens.values()),
        "level": level,
        **decided,
        "in_a_row": {each.gate.name: each.in_a_row for each in standings},
        "needed": {each.gate.name: each.gate.needed for each in standings},
        "accept_length_tested": all(verdict.accept_tested for verdict in verdicts),
        "forced": forced,
        "simulated": list(environment.simulated),
        "gates": greens,
    }
    print_json(summary)
    raise click.exceptions.Exit(0 if summary["green"] else 1)


@command.command("compare")
@click.argument("old", type=PLACE)
@click.argument("new", type=PLACE)
@click.option(
    "--tolerance", type=click.FloatRange(0, 1), default=0.02, show_default=True, help="A part that never counts."
)
@click.option("--force", is_flag=True, help="Compare results of different machines or models, too.")
def compare(old: Path, new: Path, tolerance: float, force: bool) -> None:
    """Tell what is worse in NEW than in OLD, each a result file or a directory of them.

    A difference counts where it is more than the tolerance, and more than three standard errors of the repeats. Exit
    code 1 where something is worse. The last line on stdout is a summary in JSON.
    """
    from lowlat.tools.bench.compare import compare_results
    from lowlat.tools.bench.results import read_results

    before, after = read_results(old), read_results(new)
    found = compare_results(before, after, tolerance=tolerance, force=force)
    rows = [
        (
            f"{each.scenario}: {each.case.name}",
            each.metric,
            f"{each.old:.3f}",
            f"{each.new:.3f}",
            f"{each.worse:+.1%}",
            "one repeat" if each.noise is None else f"{each.noise:.1%}",
            "" if each.judgement == "same" else each.judgement.upper(),
        )
        for each in found
    ]
    print_table(f"{new} against {old}", ("case", "figure", "old", "new", "worse by", "noise", ""), rows)
    counts = {kind: sum(each.judgement == kind for each in found) for kind in ("regression", "improvement", "same")}
    worst = [f"{each.scenario}: {each.case.name}: {each.metric}" for each in found if each.judgement == "regression"]
    names = dict.fromkeys(each.scenario for each in found)
    forced = [name for name in names if before[name].forced or after[name].forced]
    for name in forced:
        click.echo(f"{name}: run by force, without the gates that it asks for")
    print_json({"compared": len(found), **counts, "regressions": worst, "forced": forced})
    raise click.exceptions.Exit(1 if worst else 0)


@command.command("report")
@click.argument("directory", type=FOLDER)
@click.option("--out", type=NEW_FOLDER, metavar="DIR", help="Where to write.  [default: DIRECTORY]")
@click.option("--plots/--no-plots", default=True, show_default=True, help="Draw plots, which needs matplotlib.")
def report(directory: Path, out: Path | None, plots: bool) -> None:
    """Write report.html, one page that needs no other host, and report.md, of the results in DIRECTORY.

    Profiles that `lowlat profile --json` wrote there are shown by stage.
    """
    from lowlat.tools.bench.report.pages import make_report, write_pages

    for path in write_pages(make_report(directory, plots=plots), out or directory):
        click.echo(path)


def _overridden(scenario: "Scenario", values: Mapping[str, Any]) -> "Scenario":
    """The scenario with the lists and counts that were given. Raises ConfigError for one out of range."""
    import msgspec

    names = {"context": "contexts", "batch": "batches", "depths": "num_speculative_tokens"}
    names |= {name: name for name in ("steps", "warm_up", "repeats")}
    given = {field: values[name] for name, field in names.items() if values[name] is not None}
    try:
        return msgspec.convert(msgspec.to_builtins(scenario) | given, type(scenario))
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        flags = {field: f"--{name.replace('_', '-')}" for name, field in names.items()} | {names["depths"]: "-S"}
        flag = next((flag for field, flag in flags.items() if place.startswith(field)), "the scenario")
        raise ConfigError(f"{flag}: {text[:1].lower()}{text[1:]}") from error


@contextmanager
def _subject(values: Mapping[str, Any], *, drafts: bool) -> Iterator["Subject"]:
    """The subject that the options name; a random draft model is kept as long as the context."""
    from lowlat.executors.devices import leave_a_core
    from lowlat.tools.bench.geometry import read_geometries
    from lowlat.tools.bench.subject import open_model, open_random

    leave_a_core()
    given = given_options(values, SpeculativeConfig)
    own = {option: values[option] for option in RUNNING if values[option] is not None}
    prompts, temperature, name = values["prompts"], values["temperature"], values["geometry"]
    if name is None:
        model = values["model"]
        if model is None:
            given = given if given.get("method", "eagle3") != "eagle3" else {"model": bundled("head"), **given}
            prompts = prompts or bundled("prompts.json")
        elif given and given.get("method", "eagle3") == "eagle3" and "model" not in given:
            raise click.UsageError("options of speculation need a draft model (--draft-model DIR), or --method suffix")
        from lowlat.cli.models import local_draft_model, local_target
        from lowlat.options.model_names import display_name

        target = bundled("target") if model is None else local_target(model, values["dtype"] or "auto")
        if given.get("model") is not None:
            given["model"] = local_draft_model(Path(given["model"]), target)
        name = "bundled pair" if model is None else display_name(target)
        yield open_model(target, given or None, own, prompts=prompts, temperature=temperature, name=name)
        return
    if values["model"] is not None:
        raise click.UsageError("give one of --model and --geometry")
    known = read_geometries()
    if name not in known:
        raise click.BadParameter(f"{name!r:.80} is none of {', '.join(known)}", param_hint="--geometry")
    with tempfile.TemporaryDirectory(prefix="lowlat-bench-") as scratch:
        yield open_random(
            name,
            known[name],
            given,
            own,
            scratch=Path(scratch),
            drafts=drafts,
            whole_vocabulary=values["vocabulary"] == "whole",
            prompts=prompts,
            temperature=temperature,
        )


def _tell(found: "Row | Failure") -> None:
    from lowlat.tools.bench.results import Failure

    if isinstance(found, Failure):
        click.echo(f"{found.case.name}: not measured: {found.error}", err=True)
    else:
        click.echo(
            f"{found.case.name}: {found.ms_per_step.p50:.3f} ms a step, {found.tokens_per_s:.1f} tokens/s", err=True
        )


def _show_verdicts(title: str, verdicts: "Sequence[Verdict]") -> None:
    rows = [
        (
            verdict.name,
            "green" if verdict.green else "RED",
            _number(verdict.speed_up, ".2f"),
            f"{verdict.required_speed_up:.2f}",
            _number(verdict.bound, ".2f"),
            _number(verdict.accept_length, ".2f"),
            f"{verdict.required_accept_length:.2f}" if verdict.accept_tested else "not tested",
            _number(verdict.drafted_share, ".1%"),
            _over_floor(verdict.baseline_ms, verdict.baseline_over_floor),
            _over_floor(verdict.drafted_ms, verdict.drafted_over_floor),
            verdict.error or "",
        )
        for verdict in verdicts
    ]
    print_table(title, VERDICT_COLUMNS, rows)


def _show_simulated(environment: "Environment") -> None:
    for simulated in environment.simulated:
        click.echo(f"simulated: {simulated}")


def _show(result: "Result") -> None:
    rows = [
        (
            row.case.name if row.mean_width is None else f"{row.case.name}, {row.mean_width:.2f} on average",
            f"{row.ms_per_step.p50:.3f}",
            f"{row.ms_per_step.p99:.3f}",
            "" if row.time_to_first_token_ms is None else f"{row.time_to_first_token_ms.p50:.1f}",
            f"{row.tokens_per_s:.1f}",
            _number(row.accept_length, ".2f"),
            _number(row.share_of_wall, ".0%"),
        )
        for row in result.rows
    ]
    print_table(f"{result.name}: {result.environment.model}", ROW_COLUMNS, rows)
    _show_simulated(result.environment)


def _summary(result: "Result", path: Path) -> dict[str, Any]:
    rows = [
        {
            "case": row.case.name,
            "ms_per_step_p50": row.ms_per_step.p50,
            "ms_per_step_p99": row.ms_per_step.p99,
            "tokens_per_s": row.tokens_per_s,
            "accept_length": row.accept_length,
            **({} if row.mean_width is None else {"mean_width": row.mean_width}),
            "share_of_wall": row.share_of_wall,
        }
        for row in result.rows
    ]
    return {
        "scenario": result.name,
        "out": str(path),
        "complete": result.complete,
        "forced": result.forced,
        "simulated": list(result.environment.simulated),
        "rows": rows,
        "failures": {failure.case.name: failure.error for failure in result.failures},
    }


def _over_floor(ms: float | None, over: float | None) -> str:
    """A step's milliseconds, and how often its floor that is."""
    return "" if ms is None else f"{ms:.3f}" if over is None else f"{ms:.3f}, {over:.2f} x"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
