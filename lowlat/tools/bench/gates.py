"""Gates: micro measurements that large suites ask for first, judged by thresholds and remembered beside the results."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from lowlat.tools.bench.results import Environment, Result, read_struct, write_struct
from lowlat.tools.bench.run import Progress, Report, ScenarioRun, counter, measure_wall_of
from lowlat.tools.bench.runtimes import Runtimes
from lowlat.tools.bench.scenarios import Case, Gate
from lowlat.tools.bench.subject import Subject

__all__ = ["NEEDED", "GateRun", "GateState", "Verdict", "green_in_a_row", "judge", "read_state", "run_gates"]

NEEDED = 3
STATE_FILE = "gates.json"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One gate's figures beside its thresholds.

    bound              speed-up that the bytes of both steps allow at this accept length; None where it is not asked for
    required_speed_up  the threshold, or the share of the bound that is enough for a mixture of experts
    error              why it could not be measured
    """

    name: str
    green: bool
    speed_up: float | None = None
    required_speed_up: float
    bound: float | None = None
    accept_length: float | None = None
    required_accept_length: float
    error: str | None = None


class GateRun(msgspec.Struct, frozen=True, kw_only=True):
    """All gates, once; green when every one is."""

    green: bool
    environment: Environment
    gates: tuple[Verdict, ...]


class GateState(msgspec.Struct, kw_only=True, tag="gates", tag_field="kind"):
    """The runs of a directory's gates, in order."""

    version: int = 1
    runs: list[GateRun] = []


def read_state(directory: Path) -> GateState:
    """The state that a directory remembers; nothing where no gates were run. Raises ConfigError for a damaged file."""
    path = directory / STATE_FILE
    return read_struct(path, GateState) if path.exists() else GateState()


def green_in_a_row(state: GateState, environment: Environment) -> int:
    """How many of the last runs under these very conditions were green, one after the other."""
    count = 0
    for run in reversed(state.runs):
        if run.environment != environment:
            continue
        if not run.green:
            break
        count += 1
    return count


def run_gates(
    gates: Sequence[Gate],
    subject: Subject,
    directory: Path,
    *,
    times: int = 1,
    commit: str = "",
    report: Report | None = None,
    progress: Progress | None = None,
) -> list[GateRun]:
    """Measure every gate so many times, write the last rows beside the state, and remember the verdicts of each time.

    All that speculates is measured with one load of the model, and all that does not with another, where memory allows.
    Raises ConfigError.
    """
    state = read_state(directory)
    environment = subject.environment(commit)
    rounds = [[_scenario_run(gate, subject, directory, commit) for gate in gates] for _ in range(times)]
    runs = [run for each in rounds for run in each]
    advance = counter(sum(run.num_repeats for run in runs), progress)
    wall = measure_wall_of(subject.choice())
    with Runtimes(subject, [need for run in runs for need in run.needs(False)]) as runtimes:
        for run in runs:
            run.measure(False, runtimes, wall, report, advance)
    mixture = subject.config.experts is not None
    found = []
    with Runtimes(subject, [need for run in runs for need in run.needs(True)]) as runtimes:
        for each in rounds:
            for run in each:
                run.measure(True, runtimes, wall, report, advance)
            verdicts = [judge(gate, run.finish(), mixture=mixture) for gate, run in zip(gates, each, strict=True)]
            green = all(verdict.green for verdict in verdicts)
            found.append(GateRun(green=green, environment=environment, gates=tuple(verdicts)))
            state.runs.append(found[-1])
            write_struct(directory / STATE_FILE, state)
    return found


def _scenario_run(gate: Gate, subject: Subject, directory: Path, commit: str) -> ScenarioRun:
    name = f"gate-{gate.name}"
    return ScenarioRun(name, gate.scenario(), subject, directory / f"{name}.json", fresh=True, commit=commit)


def judge(gate: Gate, result: Result, *, mixture: bool) -> Verdict:
    """Hold a gate's two rows against its thresholds; mixture: the target is a mixture of experts."""
    cases = [Case(gate.context, gate.batch, depth) for depth in (0, gate.num_speculative_tokens)]
    baseline, drafted = (result.row(case) for case in cases)
    if baseline is None or drafted is None:
        errors = [f"{failure.case.name}: {failure.error}" for failure in result.failures]
        return Verdict(
            name=gate.name,
            green=False,
            required_speed_up=gate.min_speed_up,
            required_accept_length=gate.min_accept_length,
            error="; ".join(errors) or "not measured",
        )
    speed_up = drafted.tokens_per_s / baseline.tokens_per_s
    length = drafted.accept_length or 0.0
    required, bound = gate.min_speed_up, None
    if mixture and gate.experts_bound_share is not None:
        bound = length * baseline.bytes_per_step / drafted.bytes_per_step
        required = min(required, gate.experts_bound_share * bound)
    return Verdict(
        name=gate.name,
        green=speed_up >= required and length >= gate.min_accept_length,
        speed_up=speed_up,
        required_speed_up=required,
        bound=bound,
        accept_length=length,
        required_accept_length=gate.min_accept_length,
    )
