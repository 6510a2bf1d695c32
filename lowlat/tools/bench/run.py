"""This module runs a scenario case by case into one result file, and resumes it under the same conditions."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from lowlat.engine.loading.speculation import make_topologies
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError, DeviceError, LowlatError
from lowlat.executors.devices import DeviceChoice
from lowlat.tools.bench.measure import CaseRun, room_of
from lowlat.tools.bench.results import Environment, Failure, Result, Row, read_result, write_struct
from lowlat.tools.bench.runtimes import Need, Runtimes
from lowlat.tools.bench.scenarios import Case, Scenario
from lowlat.tools.bench.subject import Subject

__all__ = ["Progress", "Report", "ScenarioRun", "counter", "measure_wall_of"]

Report = Callable[[Row | Failure], None]
Progress = Callable[[int, int], None]
PROFILED_STEPS = 10


class ScenarioRun:
    """One scenario of one subject, and its result file.

    fresh    begin again, whatever the file holds
    forced   its gates were not green; the file records this
    commit   the measured commit, if there is no git checkout to ask
    profile  write each case's stages beside the result, which needs a GPU
    Raises ConfigError if no case fits the model, or if the file holds rows of other conditions.
    """

    def __init__(
        self,
        name: str,
        scenario: Scenario,
        subject: Subject,
        path: Path,
        *,
        fresh: bool = False,
        forced: bool = False,
        commit: str = "",
        profile: bool = False,
    ) -> None:
        self.path, self.scenario, self.subject, self.profile = path, scenario, subject, profile
        environment = subject.environment(commit)
        if profile and (environment.executor == "reference" or environment.device_loop):
            raise ConfigError("a profile needs an NVIDIA GPU and steps that are launched one by one: no --device-loop")
        if profile and "auto" in scenario.num_speculative_tokens:
            raise ConfigError("a profile is of steps of one width, and S = auto chooses among several: no --profile")
        self.result = Result(name=name, scenario=scenario, environment=environment, forced=forced)
        if path.exists() and not fresh:
            self._resume(read_result(path), environment)
        self._cases = [case for case in scenario.cases() if self.result.row(case) is None]
        self._check_room()
        for depth, policy in sorted({(case.num_speculative_tokens, case.policy) for case in self._cases}):
            speculative = subject.speculative(depth, adaptive=policy == "auto")
            if speculative is not None:
                make_topologies(speculative)  # refused before anything is loaded

    @property
    def num_done(self) -> int:
        """Number of the scenario's cases that the file holds."""
        return sum(self.result.row(case) is not None for case in self.scenario.cases())

    def run(self, report: Report | None = None, progress: Progress | None = None) -> Result:
        """Measure the remaining cases: those without drafts on a runtime without a draft model, the others on another.

        report    called with each row, and with each case that could not be measured
        progress  called with repeats done and repeats in all
        """
        advance = counter(self.num_repeats, progress)
        wall = measure_wall_of(self.subject.choice()) if self._cases else None
        for drafting in (False, True):
            with Runtimes(self.subject, self.needs(drafting)) as runtimes:
                self.measure(drafting, runtimes, wall, report, advance)
        return self.finish()

    def finish(self) -> Result:
        """Write and return the result; it is complete if no case failed."""
        self.result.complete = not self.result.failures
        write_struct(self.path, self.result)
        return self.result

    @property
    def num_repeats(self) -> int:
        """Number of repeats that are left."""
        return len(self._cases) * self.scenario.repeats

    def needs(self, drafting: bool) -> list[Need]:
        """Return the runtime sizes that the remaining cases need, in order: of those that draft, or of the others."""
        return [self._need(case) for case in self._cases_of(drafting)]

    def measure(
        self,
        drafting: bool,
        runtimes: Runtimes,
        wall: float | None,
        report: Report | None,
        advance: Callable[[], None],
    ) -> None:
        """Measure the cases that draft, or the others; after a failure the runtime is loaded again for the next.

        wall     the GPU's bandwidth, GB/s
        advance  called after each repeat
        """
        for case in self._cases_of(drafting):
            found: Row | Failure
            try:
                found = self._measure(runtimes.take(self._need(case)), case, wall, advance)
                self.result.rows.append(found)
            except DeviceError:
                raise
            except (LowlatError, torch.OutOfMemoryError) as error:
                found = Failure(case, str(error))
                self.result.failures.append(found)
                runtimes.drop()
            write_struct(self.path, self.result)
            if report is not None:
                report(found)

    def _cases_of(self, drafting: bool) -> list[Case]:
        return [case for case in self._cases if (case.num_speculative_tokens > 0) is drafting]

    def _measure(self, runtime: Runtime, case: Case, wall: float | None, advance: Callable[[], None]) -> Row:
        subject = self.subject
        run = CaseRun(
            runtime, case, self.scenario, subject.prompts,
            temperature=subject.temperature, wall_gb_per_s=wall,
        )  # fmt: skip
        for _ in range(self.scenario.repeats):
            run.repeat()
            advance()
        row = run.row()
        if self.profile:
            environment = self.result.environment
            place = f"{self.path.stem}-profile-{case.batch}x{case.context}-{case.depth}.json"
            conditions = {"model": environment.model, "card": environment.gpu, "executor": environment.executor}
            figures = {**conditions, "wall_gb_per_s": wall, **run.profile(PROFILED_STEPS)}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.with_name(place).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        return row

    def _need(self, case: Case) -> Need:
        depth, positions = case.num_speculative_tokens, case.context + self._room(case)
        return Need(
            depth, case.batch, positions, self.scenario.reuse_prompts, case.policy == "auto", self.scenario.kv_share
        )

    def _room(self, case: Case) -> int:
        options = self.subject.options
        strict = options.get("perf_mode") == "strict"
        return room_of(case, self.scenario, device_loop=bool(options.get("device_loop", False)), strict=strict)

    def _check_room(self) -> None:
        """Leave out cases beyond the model's positions. Raises ConfigError if that leaves none."""
        most = self.subject.config.max_context
        fitting = [case for case in self._cases if case.context + self._room(case) <= most]
        if self._cases and not fitting:
            least = min(self._cases, key=lambda case: case.context + self._room(case))
            raise ConfigError(
                f"no case of {self.result.name} fits the {most} positions of {self.subject.name}: {least.name} needs "
                f"{least.context} for the prompt and {self._room(least)} for its steps; lower --context or --steps"
            )
        for case in self._cases:
            if case not in fitting:
                need = case.context + self._room(case)
                error = f"{need} positions are needed, and {self.subject.name} has {most}"
                self.result.failures.append(Failure(case, error))
        self._cases = fitting

    def _resume(self, known: Result, environment: Environment) -> None:
        """Take over the rows of a file. Raises ConfigError if its conditions differ."""
        others = known.environment.differences(environment)
        mine, theirs = self.scenario.measuring(), known.scenario.measuring()
        for name in Scenario.__struct_fields__:
            if getattr(mine, name) != getattr(theirs, name):
                others.append(f"{name}: {getattr(theirs, name)!r}, {getattr(mine, name)!r}")
        if known.name != self.result.name:
            others.append(f"name: {known.name!r}, {self.result.name!r}")
        if others:
            raise ConfigError(
                f"{self.path} holds rows of other conditions ({'; '.join(others)}): write elsewhere (--out), or begin "
                "again (--fresh)"
            )
        self.result.rows = list(known.rows)
        self.result.forced = self.result.forced or known.forced


def counter(total: int, progress: Progress | None) -> Callable[[], None]:
    """Return a function to call after each repeat, which reports the number of repeats to `progress`."""
    numbers = itertools.count(1)

    def advance() -> None:
        done = next(numbers)
        if progress is not None:
            progress(done, total)

    return advance


def measure_wall_of(choice: DeviceChoice) -> float | None:
    """Measure the GPU's bandwidth, GB/s; None if no GPU is used."""
    if not choice.has_kernels or not torch.cuda.is_available():
        return None
    from lowlat.tools.profile.recording import gpu_wall

    return gpu_wall(choice.device)
