"""The schema of a comparison with other engines: rows by engine and case, and what could not be compared, and why."""

from pathlib import Path

import msgspec

from lowlat.errors import ConfigError
from lowlat.tools.bench.results import Environment, Memory, Spread, read_struct
from lowlat.tools.bench.scenarios import Case

__all__ = ["Comparison", "Estimate", "NotCompared", "PeerResult", "PeerRow", "read_peers"]

VERSION = 2


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case of one engine, measured in a process of its own.

    against               the engine that its pair's other run is of; empty where it ran alone
    pair                  the number of its pair, from 0; in odd ones lowlat runs second
    settings              the engine's settings that its figures depend on, as they were given to it
    num_steps             timed, over all repeats
    steps_a_sample        steps that a sample is the mean of: 1, or more for an engine that reports totals alone
    ms_per_step           from a step's tokens in the caller's hands to the next one's
    ms_per_token          of one request: a step over the tokens that it brought an active request
    first_token_ms        from submission, the requests of a batch together
    tokens_per_s          of all requests together, without prefill
    accept_length         tokens that a step brings a request; None without drafts
    memory                what the GPU's use grew by (None where that is not known), and the host's largest process
    """

    engine: str
    version: str
    case: Case
    settings: dict[str, str]
    num_steps: int
    steps_a_sample: int
    ms_per_step: Spread
    ms_per_token: Spread
    first_token_ms: Spread | None
    tokens_per_s: float
    accept_length: float | None
    memory: Memory
    against: str = ""
    pair: int = 0


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A median over pairs of runs, and its 95 % interval by a bootstrap over pairs."""

    median: float
    lower: float
    upper: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of lowlat and of another engine, in one case.

    versions  of both engines, by name
    figure    ms_per_step, ms_per_token or first_token_ms
    pairs     of runs, from which the medians are
    ratio     the other's over lowlat's, pair by pair
    """

    case: Case
    engine: str
    versions: dict[str, str]
    figure: str
    pairs: int
    lowlat: Estimate
    other: Estimate
    ratio: Estimate


class NotCompared(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an engine, or of one of its cases, that cannot be compared with lowlat's, and the reason."""

    engine: str
    case: Case | None
    figures: str
    reason: str


class PeerResult(msgspec.Struct, kw_only=True, tag="peers", tag_field="kind"):
    """A comparison's file; environment is lowlat's, whose GPU, driver and model all engines share.

    pairs  of runs of lowlat and each other engine, a case
    load  processes that ran or waited on the machine, a minute's mean, before each row: those of a machine of one's own
          are the engines'
    """

    version: int = VERSION
    environment: Environment
    steps: int
    warm_up: int
    repeats: int
    pairs: int
    accept_length: float | None
    engines: tuple[str, ...]
    load: list[float] = []
    rows: list[PeerRow] = []
    not_compared: list[NotCompared] = []
    comparisons: list[Comparison] = []


def read_peers(path: Path) -> PeerResult:
    """One result file. Raises ConfigError for one of another kind or version."""
    result = read_struct(path, PeerResult)
    if result.version != VERSION:
        raise ConfigError(f"{path}: version {result.version} of the schema; this is for version {VERSION}")
    return result
