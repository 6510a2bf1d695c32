"""This module runs gates: measurements that large scenarios require first, with stored verdicts by thresholds.

A verdict counts for the same definition under the same conditions: with another threshold, scenario, commit or imposed
acceptance it is another gate. Full gates are measured only when the micro gates before them are green.

Each row is written as soon as it is measured, and each verdict as soon as its rows are there, so that a run that was
broken off continues where it ended.
"""

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from lowlat.errors import ConfigError
from lowlat.tools.bench.results import GATES_OWN, Environment, Result, read_result, read_struct, write_struct
from lowlat.tools.bench.run import Progress, Report, ScenarioRun, counter, measure_wall_of
from lowlat.tools.bench.runtimes import Runtimes
from lowlat.tools.bench.scenarios import Case, Gate
from lowlat.tools.bench.subject import Subject

__all__ = [
    "GateRun", "GateState", "Standing", "Verdict", "check_gates", "default_length", "gates_environment", "judge",
    "read_state", "run_gates", "standing",
]  # fmt: skip

STATE_FILE = "gates.json"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One gate's figures next to its thresholds.

    gate               its definition; None in older files without it, which count for no gate
    bound              speed-up that the bytes of both steps allow at this accept length; None without experts
    required_speed_up  the threshold, or the required share of the bound if that is more
    accept_length      tokens a drafted step; tokens a step, if steps chose their draft lengths
    accept_tested      false if acceptance was imposed, or draft lengths were chosen: it is then not judged
    drafted_share      the share of steps that drafted, if steps chose their draft lengths
    baseline_ms, drafted_ms  the median steps of both
    baseline_over_floor, drafted_over_floor  these over the time that their bytes take; None without a GPU
    distinct_experts   distinct experts in a layer of the drafted step
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
    drafted_share: float | None = None
    baseline_ms: float | None = None
    drafted_ms: float | None = None
    baseline_over_floor: float | None = None
    drafted_over_floor: float | None = None
    distinct_experts: float | None = None
    error: str | None = None


class GateRun(msgspec.Struct, frozen=True, kw_only=True):
    """One round of a gate, or of gates that were measured together; green if all of them are.

    forced  gates that they require first were not green, or were green by force
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
    """The standing of a gate: how many of its last runs were green in a row, and whether one of them was forced."""

    gate: Gate
    in_a_row: int
    forced: bool

    @property
    def green(self) -> bool:
        """Whether it was green as often in a row as required."""
        return self.in_a_row >= self.gate.needed


def read_state(directory: Path) -> GateState:
    """Read a directory's state of gates, which is empty if none were run. Raises ConfigError for a damaged file."""
    path = directory / STATE_FILE
    return read_struct(path, GateState) if path.exists() else GateState()


def standing(state: GateState, environment: Environment, gate: Gate) -> Standing:
    """Return the standing of a gate with exactly this definition under exactly these conditions."""
    count, forced = 0, False
    for run in reversed(state.runs):
        verdict = next((each for each in run.gates if each.gate == gate), None)
        if not run.environment.holds_for(environment) or verdict is None:
            continue
        if not verdict.green or count == gate.needed:
            break
        count, forced = count + 1, forced or run.forced
    return Standing(gate=gate, in_a_row=count, forced=forced)


def check_gates(
    what: str, gates: Sequence[Gate], state: GateState, environment: Environment, *, force: bool = False
) -> bool:
    """Refuse to go on unless the gates are green; returns whether it goes on by force, now or in the gates' runs.

    Raises ConfigError with each gate and its standing.
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


def default_length(state: GateState, environment: Environment, gates: Sequence[Gate]) -> int | str:
    """Return the default draft length by the gates: auto if its gate is green and the fixed length's gate is not.

    The two gates have the same slots and context. Otherwise it is the fixed length.

    gates  gates of one level for one kind of target, of both policies
    """
    fixed = {(each.context, each.batch): each for each in gates if each.policy == "fixed"}
    chosen = [each for each in gates if each.policy == "auto"]
    pairs = [(each, fixed[each.context, each.batch]) for each in chosen if (each.context, each.batch) in fixed]
    stands = {each: standing(state, environment, each).green for pair in pairs for each in pair}
    if any(stands[auto] and not stands[plain] for auto, plain in pairs):
        return "auto"
    return next(iter(fixed.values())).num_speculative_tokens


def run_gates(
    gates: Sequence[Gate],
    subject: Subject,
    directory: Path,
    *,
    times: int = 1,
    only_missing: bool = False,
    imposes: bool = False,
    commit: str = "",
    forced: bool = False,
    report: Report | None = None,
    progress: Progress | None = None,
) -> list[GateRun]:
    """Measure each gate `times` times, keep its last rows beside the state, and store each verdict.

    only_missing  run no more rounds than a gate still needs to be green as often in a row as required
    imposes       impose the accept length that each gate requires
    All rows without drafts are measured with one load of the model, those of one acceptance and policy with another, if
    memory allows. Rows of a round that was broken off are reused. Raises ConfigError.
    """
    state, environment = read_state(directory), gates_environment(subject, commit, imposes=imposes)
    own = {
        gate: subject.imposing(gate.min_accept_length, gate.num_speculative_tokens) if imposes else subject
        for gate in gates
    }
    rounds = [
        _Round(gate, own[gate], directory, number, commit, forced)
        for gate in gates
        for number in range(_num_rounds(gate, state, environment, times, only_missing=only_missing))
    ]  # fmt: skip
    advance = counter(sum(each.run.num_repeats for each in rounds), progress)
    wall = measure_wall_of(subject.choice())
    with Runtimes(subject, [need for each in rounds for need in each.run.needs(False)]) as runtimes:
        for each in rounds:
            each.run.measure(False, runtimes, wall, report, advance)
    experts = subject.config.experts is not None
    found = []
    for _, together in groupby(sorted(rounds, key=_Round.load), _Round.load):
        alike = list(together)
        with Runtimes(alike[0].subject, [need for each in alike for need in each.run.needs(True)]) as runtimes:
            for each in alike:
                each.run.measure(True, runtimes, wall, report, advance)
                verdict = judge(each.gate, each.run.finish(), moe=experts)
                each.keep()
                found.append(GateRun(green=verdict.green, environment=environment, gates=(verdict,), forced=forced))
                state.runs.append(found[-1])
                write_struct(directory / STATE_FILE, state)
    return found


def gates_environment(subject: Subject, commit: str, *, imposes: bool) -> Environment:
    """Return the conditions of gates; imposes: with the accept length that each requires. Raises ConfigError."""
    found = subject.environment(commit)
    return msgspec.structs.replace(found, simulated=(*found.simulated, GATES_OWN)) if imposes else found


def _num_rounds(gate: Gate, state: GateState, environment: Environment, times: int, *, only_missing: bool) -> int:
    if not only_missing:
        return times
    return min(times, max(gate.needed - standing(state, environment, gate).in_a_row, 0))


class _Round:
    """One measurement of a gate; its rows are in a file of their own until it is judged."""

    def __init__(self, gate: Gate, subject: Subject, directory: Path, number: int, commit: str, forced: bool) -> None:
        self.gate, self.subject = gate, subject
        name = f"gate-{gate.name}"
        self._rows, self._kept = directory / f"{name}.{number + 1}.json", directory / f"{name}.json"
        fresh = True
        if self._rows.exists():
            known = read_result(self._rows)
            fresh = (known.scenario, known.environment) != (gate.scenario(), subject.environment(commit))
        self.run = ScenarioRun(name, gate.scenario(), subject, self._rows, fresh=fresh, forced=forced, commit=commit)

    def load(self) -> tuple[str, str]:
        """A key, equal for rounds that one load of the model can measure."""
        return self.gate.policy, repr(self.subject.speculation)

    def keep(self) -> None:
        """Keep its rows as the gate's last ones."""
        os.replace(self._rows, self._kept)


def judge(gate: Gate, result: Result, *, moe: bool) -> Verdict:
    """Compare a gate's two rows with its thresholds; moe: the target has experts.

    An accept length that was imposed, or that comes from chosen draft lengths, is shown but not judged.
    """
    baseline, drafted = (result.row(case) for case in (Case(gate.context, gate.batch, 0), gate.judged))
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
    speed_up, chosen = drafted.tokens_per_s / baseline.tokens_per_s, gate.policy == "auto"
    length = drafted.effective_accept_length if chosen else drafted.accept_length or 0.0
    tested = drafted.simulated_accept_length is None and not chosen
    required, bound = gate.min_speed_up, None
    if moe:
        bound = length * baseline.bytes_per_step / drafted.bytes_per_step
        required = max(required, (gate.experts_bound_share or 0.0) * bound)
    accepted = not tested or length >= gate.min_accept_length
    drafts = not chosen or (drafted.drafted_share or 0.0) >= gate.min_drafted_share
    return Verdict(
        name=gate.name,
        green=speed_up >= required and accepted and drafts and not errors,
        gate=gate,
        speed_up=speed_up,
        required_speed_up=required,
        bound=bound,
        accept_length=length,
        required_accept_length=gate.min_accept_length,
        accept_tested=tested,
        drafted_share=drafted.drafted_share,
        baseline_ms=baseline.ms_per_step.p50,
        drafted_ms=drafted.ms_per_step.p50,
        baseline_over_floor=baseline.over_floor,
        drafted_over_floor=drafted.over_floor,
        distinct_experts=drafted.distinct_experts,
        error=errors or None,
    )
