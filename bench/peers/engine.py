"""The interface of an engine, what it is asked for, and the arrival of tokens as samples."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from lowlat.tools.bench.measure import Samples
from lowlat.tools.bench.prompts import Prompts
from lowlat.tools.bench.scenarios import Case

__all__ = [
    "Arrivals",
    "Engine",
    "Found",
    "GpuEngine",
    "Job",
    "Mark",
    "Measured",
    "found_package",
    "prompts_of",
    "without_draft_model",
]

Mark = Callable[[], None]  # called while the engine still holds all its memory


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One case that an engine is to measure.

    directory        the target's, with config.json; its weights lie there where `geometry` is None
    draft_directory  the draft model's files; None: nothing to draft with
    geometry         name of the random weights' shape
    gguf             the target's weights for llama.cpp
    prompts          token ids to cut prompts from, in JSON; None: random ones
    accept_length    tokens a step that are imposed where the engine can; None: acceptance is the draft model's
    """

    engine: str
    case: Case
    steps: int
    warm_up: int
    repeats: int
    device: str
    dtype: str
    vocab_size: int
    directory: str
    draft_directory: str | None = None
    geometry: str | None = None
    gguf: str | None = None
    prompts: str | None = None
    accept_length: float | None = None

    @property
    def depth(self) -> int:
        """Drafts a step."""
        return self.case.num_speculative_tokens

    @property
    def imposed_length(self) -> float | None:
        """Tokens a step that this case can be made to accept."""
        return None if self.accept_length is None or not self.depth else min(self.accept_length, self.depth + 1.0)

    @property
    def room(self) -> int:
        """Tokens after the prompt that a request needs: some more than the steps, for requests that begin earlier."""
        waiting = self.case.batch * (2 + -(-self.case.context // 512))
        return (self.warm_up + self.steps + waiting + 4) * (self.depth + 1)


class Found(NamedTuple):
    """The version that is installed, or the reason why there is none."""

    version: str
    reason: str = ""


@dataclass
class Measured:
    """An engine's measurement: the samples of each repeat, and the settings that they depend on."""

    repeats: list[Samples] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    steps_a_sample: int = 1


class Engine(Protocol):
    """One engine. `available` and `refusal` import nothing of it; `measure` runs in a process of its own."""

    name: str

    def available(self) -> Found:
        """The installed version, or why there is none."""

    def refusal(self, job: Job) -> str:
        """Why a case cannot be measured; empty where it can."""

    def measure(self, job: Job, mark: Mark) -> Measured:
        """Measure a case."""


def found_package(module: str, distribution: str = "") -> Found:
    """A Python package's version, without an import of it."""
    try:
        version = metadata.version(distribution or module)
    except metadata.PackageNotFoundError:
        version = ""
    if find_spec(module) is None:
        return Found("", "not installed")
    return Found(version or "unknown")


def without_draft_model(job: Job) -> str:
    """Why an engine that needs a draft model cannot measure this depth; empty where it can."""
    return "no draft model" if job.depth and job.draft_directory is None else ""


def prompts_of(job: Job) -> list[list[int]]:
    """The case's prompts, the same for every engine. Raises ConfigError for a file that holds none."""
    if job.prompts is None:
        return Prompts.random(job.vocab_size).of(job.case)
    return Prompts.read(Path(job.prompts), None, job.vocab_size).of(job.case)


class GpuEngine:
    """The common part of the engines that need a GPU, and for drafts a draft model.

    package  that is installed with it
    shown    its name in messages
    """

    package: ClassVar[str]
    shown: ClassVar[str]

    def available(self) -> Found:
        """The installed version, or why there is none."""
        return found_package(self.package)

    def refusal(self, job: Job) -> str:
        """Why a case cannot be measured; empty where it can."""
        return without_draft_model(job) if job.device.startswith("cuda") else f"{self.shown} needs a GPU"


class Arrivals:
    """Tokens of requests that decode side by side, as they come into the caller's hands.

    A step is complete when every request has its tokens of it, or one has tokens of the next step. Steps count from the
    first one after all requests had a token, without those that warm up. The clock starts with the object.
    """

    def __init__(self, job: Job, names: Sequence[str]) -> None:
        self._job, self._waiting = job, set(names)
        self._totals = dict.fromkeys(names, 0)
        self._lengths = dict.fromkeys(names, job.case.context)
        self._step: dict[str, int] = {}
        self._num_steps, self._started = 0, False
        self._begin = self._last = self._closed = time.perf_counter()
        self.samples = Samples()

    @property
    def complete(self) -> bool:
        """Whether there are as many steps as asked for."""
        return len(self.samples.step_ms) >= self._job.steps

    def take(self, totals: Iterable[tuple[str, int]], now: float | None = None) -> None:
        """Take tokens that came together: for each request how many it has had in all."""
        now = time.perf_counter() if now is None else now
        for name, total in totals:
            count, self._totals[name] = total - self._totals[name], total
            if count <= 0:
                continue
            if name in self._step:
                self._close()
            self._step[name] = count
            self._last = now
            if name in self._waiting:
                self._waiting.discard(name)
                self.samples.first_ms.append(1e3 * (now - self._begin))
        if len(self._step) == len(self._totals):
            self._close()

    def _close(self) -> None:
        """End a step; the one with the last request's first token is not counted either."""
        elapsed, step, self._step = self._last - self._closed, self._step, {}
        self._closed = self._last
        counts, self._started = self._started, not self._waiting
        self._num_steps += counts
        if counts and self._num_steps > self._job.warm_up and not self.complete:
            self.samples.add(1e3 * elapsed, [step], self._lengths)
            return
        for name, count in step.items():
            self._lengths[name] += count
