"""Gates: measurements that large scenarios ask for first, judged by thresholds and remembered next to the results.

A gate counts by its whole definition and under the same conditions: another threshold, scenario, commit or imposed
acceptance is another gate. Full gates are measured only when the micro gates before them are green.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from lowlat.errors import ConfigError
from lowlat.tools.bench.results import Environment, Result, read_struct, write_struct
from lowlat.tools.bench.run import Progress, Report, ScenarioRun, counter, measure_wall_of
from lowlat.tools.bench.runtimes import Runtimes
from lowlat.tools.bench.scenarios import Case, Gate
from lowlat.tools.bench.subject import Subject

__all__ = [
    "GateRun", "GateState", "Standing", "Verdict", "check_gates", "judge", "read_state", "run_gates", "standing",
]  # fmt: skip

STATE_FILE = "gates.json"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One gate's figures next to its thresholds.

    gate               its definition; None in files of before it was kept, which count for no gate
    bound              speed-up that the bytes of both steps allow at this accept length; None where it is not asked for
    required_speed_up  the threshold, or the share of the bound that is enough for a mixture of experts
    accept_tested      false where acceptance was imposed: the accept length is then not judged
    error              why it could not be measured
    """

    name: str
    green: bool
    gate: Gate | None = None
    speed_up: float | None = None
    required_speed_up: float
    bound: float | None = None
    accept_length: float | None = None
    required_accept_length: float
    accept_tested: bool = True
    error: str | None = None


class GateRun(msgspec.Struct, frozen=True, kw_only=True):
    """Gates measured together, once; green when every one is.

    forced  gates that they ask for first were not green, or were so by force
    """

    green: bool
    environment: Environment
    gates: tuple[Verdict, ...]
    forced: bool = False


class GateState(msgspec.Struct, kw_only=True, tag="gates", tag_field="kind"):
    """The runs of a directory's gates, in order."""

    version: int = 1
    runs: list[GateRun] = []


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a gate stands: how many of its last runs were green in a row, and whether one of them was forced."""

    gate: Gate
    in_a_row: int
    forced: bool

    @property
    def green(self) -> bool:
        """Whether it was green as often in a row as it needs to be."""
        return self.in_a_row >= self.gate.needed


def read_state(directory: Path) -> GateState:
    """The state that a directory remembers; nothing where no gates were run. Raises ConfigError for a damaged file."""
    path = directory / STATE_FILE
    return read_struct(path, GateState) if path.exists() else GateState()


def standing(state: GateState, environment: Environment, gate: Gate) -> Standing:
    """How a gate of this very definition stands under these very conditions."""
    count, forced = 0, False
    for run in reversed(state.runs):
        verdict = next((each for each in run.gates if each.gate == gate), None)
        if run.environment != environment or verdict is None:
            continue
        if not verdict.green or count == gate.needed:
            break
        count, forced = count + 1, forced or run.forced
    return Standing(gate=gate, in_a_row=count, forced=forced)


def check_gates(
    what: str, gates: Sequence[Gate], state: GateState, environment: Environment, *, force: bool = False
) -> bool:
    """Refuse what asks for gates that are not green; return whether it goes on by force, its gates' or its own.

    Raises ConfigError that names each gate and how it stands.
    """
    found = [standing(state, environment, gate) for gate in gates]
    red = [each for each in found if not each.green]
    if red and not force:
        stand = "; ".join(
            f"{each.gate.name} was green {each.in_a_row} of {each.gate.needed} times in a row" for each in red
        )
        levels = " and ".join(dict.fromkeys(f"`lowlat bench gates --level {each.gate.level}`" for each in red))
        raise ConfigError(
            f"{what} needs green gates under the same conditions, and {stand}: run {levels} with the same options, or "
            "--force, which marks the result"
        )
    return bool(red) or any(each.forced for each in found)


def run_gates(
    gates: Sequence[Gate],
    subject: Subject,
    directory: Path,
    *,
    times: int = 1,
    commit: str = "",
    forced: bool = False,
    report: Report | None = None,
    progress: Progress | None = None,
) -> list[GateRun]:
    """Measure every gate so many times, write the last rows next to the state, and remember the verdicts of each time.

    All that speculates is measured with one load of the model, and all that does not with another, where memory allows.
    Raises ConfigError.
    """
    state = read_state(directory)
    environment = subject.environment(commit)
    rounds = [[_scenario_run(gate, subject, directory, commit, forced) for gate in gates] for _ in range(times)]
    runs = [run for each in rounds for run in each]
    advance = counter(sum(run.num_repeats for run in runs), progress)
    wall = measure_wall_of(subject.choice())
    with Runtimes(subject, [need for run in runs for need in run.needs(False)]) as runtimes:
        for run in runs:
            run.measure(False, runtimes, wall, report, advance)
    moe = subject.config.experts is not None
    found = []
    with Runtimes(subject, [need for run in runs for need in run.needs(True)]) as runtimes:
        for each in rounds:
            for run in each:
                run.measure(True, runtimes, wall, report, advance)
            verdicts = [judge(gate, run.finish(), moe=moe) for gate, run in zip(gates, each, strict=True)]
            green = all(verdict.green for verdict in verdicts)
            found.append(GateRun(green=green, environment=environment, gates=tuple(verdicts), forced=forced))
            state.runs.append(found[-1])
            write_struct(directory / STATE_FILE, state)
    return found


def _scenario_run(gate: Gate, subject: Subject, directory: Path, commit: str, forced: bool) -> ScenarioRun:
    name = f"gate-{gate.name}"
    path = directory / f"{name}.json"
    return ScenarioRun(name, gate.scenario(), subject, path, fresh=True, forced=forced, commit=commit)


def judge(gate: Gate, result: Result, *, moe: bool) -> Verdict:
    """Hold a gate's two judged rows against its thresholds; MoE layer: the target is a mixture of experts.

    An accept length that was imposed is shown and not judged.
    """
    cases = [Case(gate.context, gate.batch, depth) for depth in (0, gate.num_speculative_tokens)]
    baseline, drafted = (result.row(case) for case in cases)
    errors = "; ".join(f"{failure.case.name}: {failure.error}" for failure in result.failures)
    if baseline is None or drafted is None:
        return Verdict(
            name=gate.name,
            green=False,
            gate=gate,
            required_speed_up=gate.min_speed_up,
            required_accept_length=gate.min_accept_length,
            error=errors or "not measured",
        )
    speed_up = drafted.tokens_per_s / baseline.tokens_per_s
    length, tested = drafted.accept_length or 0.0, drafted.simulated_accept_length is None
    required, bound = gate.min_speed_up, None
    if moe and gate.experts_bound_share is not None:
        bound = length * baseline.bytes_per_step / drafted.bytes_per_step
        required = min(required, gate.experts_bound_share * bound)
    accepted = not tested or length >= gate.min_accept_length
    return Verdict(
        name=gate.name,
        green=speed_up >= required and accepted and not errors,
        gate=gate,
        speed_up=speed_up,
        required_speed_up=required,
        bound=bound,
        accept_length=length,
        required_accept_length=gate.min_accept_length,
        accept_tested=tested,
        error=errors or None,
    )
