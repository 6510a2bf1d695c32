"""This is the schema of result files: the measurement, its subject and its machine. Reading one checks it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from lowlat.errors import ConfigError
from lowlat.tools.bench.scenarios import Case, Scenario

__all__ = [
    "GATES_OWN", "ActiveSlots", "Environment", "Failure", "Memory", "Perf", "Repeat", "Result", "Row", "Speculation",
    "Spread", "read_result", "read_results", "read_struct", "write_struct",
]  # fmt: skip

VERSION = 1
GATES_OWN = "acceptance: of each gate its own, imposed"
T = TypeVar("T")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution: mean, percentiles, and the number of samples."""

    mean: float
    p50: float
    p99: float
    p999: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise one sample or more."""
        p50, p99, p999 = (round(float(value), 5) for value in np.percentile(values, (50, 99, 99.9)))
        return cls(mean=round(float(np.mean(values)), 5), p50=p50, p99=p99, p999=p999, count=len(values))


class ActiveSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that took part in a step, over the timed steps."""

    min: int
    mean: float
    max: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that torch's allocator holds on the GPU (None without one), and the process's largest size on the host."""

    device_bytes: int | None
    host_peak_bytes: int


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """The block `eagle_speculation` over the timed steps, as `SpeculativeDecodingStats` defines it."""

    num_drafts: int
    total_draft_tokens: int
    total_accepted_tokens: int
    mean_acceptance_rate: float
    mean_acceptance_length: float
    fraction_accepted_ge2: float
    num_rewound_tokens: int
    rewind_steps: int
    accepted_length_histogram: list[int]
    acceptance_by_position: list[float]
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    simulated: bool
    by_source: dict[str, dict[str, int]] = {}


class Perf(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime's counters, as `PerfCounters` defines them; waits, copies and steps are those of the timed steps."""

    launches: int
    planned_launches: int
    tuned_launches: int
    library_calls: int
    fallback_calls: int
    synchronisations: int
    copies: int
    undrafted_steps: dict[str, int]


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat's figures, for an estimate of the row's noise; the first token's is None if it was not timed."""

    ms_per_step_p50: float
    ms_per_step_p99: float
    tokens_per_s: float
    accept_length: float | None
    time_to_first_token_ms: float | None


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One case, measured.

    simulated_accept_length  imposed tokens a step; None: acceptance is the draft model's own
    mean_context             mean tokens of a request over the timed steps
    ms_per_step              from a step's tokens to the next one's, by the host's clock
    ms_per_token             of one request, one sample a token: a step's time over its new tokens of an active slot
    time_to_first_token_ms   from submission, for all requests of a batch at once; None if prompts were shared
    tokens_per_s             of all requests together
    effective_accept_length  new tokens of an active slot a step, also in steps without drafts
    bytes_per_step           bytes that a step must read: weights, with those of chosen experts, keys and values
    distinct_experts         mean number of experts that a layer's rows choose, with a shared one; None without MoE
    wall_gb_per_s            the GPU's read bandwidth, measured in the same run; None without a GPU
    floor_ms                 the time of bytes_per_step at that bandwidth
    share_of_wall            the floor over the median step
    eagle_speculation        absent in JSON if nothing was drafted
    perf                     absent in files older than these counters
    steps_by_width           steps of a request that verified 0, 1, 2, ... drafts, if each step chose (policy auto)
    mean_width               mean drafts that these steps verified
    numerics                 `Runtime.numerics`; absent in older files
    attention_tiles          tiles that the timed steps walked, by kind of layer, if count_tiles is set
    """

    case: Case
    simulated_accept_length: float | None = None
    num_steps: int
    num_tokens: int
    mean_context: float
    ms_per_step: Spread
    ms_per_token: Spread
    time_to_first_token_ms: Spread | None
    tokens_per_s: float
    effective_accept_length: float
    active_slots: ActiveSlots
    bytes_per_step: int
    distinct_experts: float | None
    wall_gb_per_s: float | None
    floor_ms: float | None
    share_of_wall: float | None
    memory: Memory
    repeats: tuple[Repeat, ...]
    eagle_speculation: Speculation | None = None
    perf: Perf | None = None
    steps_by_width: list[int] | None = None
    mean_width: float | None = None
    numerics: str | None = None
    attention_tiles: dict[str, dict[str, int]] = {}

    @property
    def accept_length(self) -> float | None:
        """Tokens a drafted step, bonus included; None if nothing was drafted."""
        return None if self.eagle_speculation is None else self.eagle_speculation.mean_acceptance_length

    @property
    def drafted_share(self) -> float | None:
        """The share of steps that chose to draft; None if no step could choose."""
        counts = self.steps_by_width
        return None if not counts else 1.0 - counts[0] / max(sum(counts), 1)

    @property
    def over_floor(self) -> float | None:
        """The median step over its floor; None without a GPU."""
        return None if self.floor_ms is None else self.ms_per_step.p50 / self.floor_ms


class Failure(msgspec.Struct, frozen=True):
    """A case that could not be measured, and why."""

    case: Case
    error: str


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of all rows of a file: code, machine, model, and what is simulated.

    simulated               what was not measured on real weights, prompts or acceptance
    distinct_prompt_tokens  tokens of the text that prompts are cut from: longer ones repeat it; 0: random tokens
    quantize                the format to which the target's weights were rounded at load; empty: none
    activations             the format to which prompts' rows were rounded; empty: none
    max_prefill_chunks      the most chunks of a prompt that ran at once; None in files before this option
    """

    lowlat: str
    commit: str
    python: str
    torch: str
    cuda: str
    gpu: str = msgspec.field(name="card")
    driver: str
    processor: str
    cores: int
    threads: int
    executor: str
    device_loop: bool
    dtype: str
    model: str
    speculator: str
    prompts: str
    distinct_prompt_tokens: int
    temperature: float
    simulated: tuple[str, ...]
    perf_mode: str = "default"
    quantize: str = ""
    kv_cache_dtype: str = "auto"
    activations: str = ""
    tensor_parallel_size: int = 1
    max_prefill_chunks: int | None = None

    def holds_for(self, other: "Environment") -> bool:
        """Whether gates measured under these conditions count under others.

        Gates that impose their own acceptance count under any other imposed acceptance, too.
        """
        if GATES_OWN not in self.simulated:
            return self == other
        mine, theirs = (
            {each.split(":")[0] if each.startswith("acceptance:") else each for each in one.simulated}
            for one in (self, other)
        )
        return mine == theirs and msgspec.structs.replace(self, simulated=other.simulated) == other

    def differences(self, other: "Environment") -> list[str]:
        """Return the fields that differ, as `field: mine, theirs`."""
        names = self.__struct_fields__
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return [f"{name}: {mine!r}, {theirs!r}" for name, (mine, theirs) in pairs.items() if mine != theirs]


class Result(msgspec.Struct, kw_only=True, tag="scenario", tag_field="kind"):
    """A scenario's file.

    forced    its gates, or gates before those, were not green
    complete  nothing is left to run
    """

    version: int = VERSION
    name: str
    scenario: Scenario
    environment: Environment
    forced: bool = False
    complete: bool = False
    rows: list[Row] = []
    failures: list[Failure] = []

    def row(self, case: Case) -> Row | None:
        """Return a case's row, or None if it was not measured."""
        return next((row for row in self.rows if row.case == case), None)


def write_struct(path: Path, value: msgspec.Struct) -> None:
    """Write a struct as indented JSON, completely or not at all. Raises ConfigError if that fails."""
    beside = path.with_suffix(path.suffix + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def read_struct(path: Path, kind: type[T]) -> T:
    """Read and check one file. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_result(path: Path) -> Result:
    """Read one result file. Raises ConfigError for another kind or version of file."""
    result = read_struct(path, Result)
    if result.version != VERSION:
        raise ConfigError(f"{path}: version {result.version} of the schema; this lowlat reads version {VERSION}")
    return result


class _Kind(msgspec.Struct):
    kind: str = ""


def _is_result(path: Path) -> bool:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kind).kind == "scenario"
    except (OSError, msgspec.DecodeError):
        return False


def read_results(place: Path) -> dict[str, Result]:
    """Read the result in a file, by its scenario's name, or those in a directory, by their files' names.

    Raises ConfigError if there are none.
    """
    if not place.is_dir():
        found = read_result(place)
        return {found.name: found}
    results = {path.stem: read_result(path) for path in sorted(place.glob("*.json")) if _is_result(path)}
    if not results:
        raise ConfigError(f"{place}: no results of `lowlat bench run` are here")
    return results
