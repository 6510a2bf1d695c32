"""This module compares two results of the same scenarios, and finds figures that are worse by more than noise.

Noise is estimated from the repeats: a difference counts if it exceeds three standard errors of the repeats' means, and
the tolerance. With a single repeat the noise is unknown, and only the tolerance decides.
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from statistics import fmean, variance
from typing import Literal, NamedTuple

import msgspec

from lowlat.errors import ConfigError
from lowlat.tools.bench.results import Environment, Repeat, Result, Row
from lowlat.tools.bench.scenarios import Case

__all__ = ["METRICS", "Difference", "check_comparable", "compare_results"]

STANDARD_ERRORS = 3.0
SAME = ("gpu", "processor", "executor", "device_loop", "dtype", "model", "speculator", "prompts", "temperature")
Judgement = Literal["regression", "improvement", "same"]


class Metric(NamedTuple):
    """A figure of a repeat, and whether a larger one is better."""

    name: str
    of: Callable[[Repeat], float | None]
    more_is_better: bool


METRICS = (
    Metric("ms_per_step_p50", lambda repeat: repeat.ms_per_step_p50, False),
    Metric("ms_per_step_p99", lambda repeat: repeat.ms_per_step_p99, False),
    Metric("tokens_per_s", lambda repeat: repeat.tokens_per_s, True),
    Metric("time_to_first_token_ms", lambda repeat: repeat.time_to_first_token_ms, False),
    Metric("accept_length", lambda repeat: repeat.accept_length, True),
)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one case, old and new: means over repeats.

    worse  the share of the old figure by which the new one is worse; negative if it is better
    noise  the difference that repeats alone may cause, as such a share; None if one side has a single repeat
    """

    scenario: str
    case: Case
    metric: str
    old: float
    new: float
    worse: float
    noise: float | None
    judgement: Judgement


def compare_results(
    old: Mapping[str, Result], new: Mapping[str, Result], *, tolerance: float, force: bool = False
) -> list[Difference]:
    """Compare each figure that both results have, scenario by scenario.

    tolerance  share of a figure by which a difference never counts
    force      compare even results of different machines or models
    Raises ConfigError if nothing can be compared.
    """
    found: list[Difference] = []
    for name in old:
        if name not in new:
            continue
        if not force:
            check_comparable(name, old[name].environment, new[name].environment)
        for row in old[name].rows:
            other = new[name].row(row.case)
            if other is not None:
                found += _differences(name, row, other, tolerance)
    if not found:
        raise ConfigError(
            f"nothing to compare: the old results are of {', '.join(old)}, the new ones of {', '.join(new)}, and "
            "no case is in both"
        )
    return found


def check_comparable(name: str, old: Environment, new: Environment) -> None:
    """Refuse results of different machines, models or simulations. Raises ConfigError."""
    fields = (*SAME, "simulated")
    others = [f"{each}: {getattr(old, each)!r}, {getattr(new, each)!r}" for each in fields
              if getattr(old, each) != getattr(new, each)]  # fmt: skip
    if others:
        raise ConfigError(f"{name}: results of different conditions ({'; '.join(others)}): --force compares them")


def _differences(scenario: str, old: Row, new: Row, tolerance: float) -> list[Difference]:
    found = []
    for metric in METRICS:
        before, after = _values(metric, old), _values(metric, new)
        if not before or not after or not fmean(before):
            continue
        mean, other = fmean(before), fmean(after)
        worse = (mean - other if metric.more_is_better else other - mean) / mean
        noise = _noise(before, after)
        limit = max(tolerance, noise or 0.0)
        judgement: Judgement = "regression" if worse > limit else "improvement" if worse < -limit else "same"
        found.append(
            Difference(
                scenario=scenario,
                case=old.case,
                metric=metric.name,
                old=mean,
                new=other,
                worse=worse,
                noise=noise,
                judgement=judgement,
            )
        )
    return found


def _values(metric: Metric, row: Row) -> list[float]:
    values = [metric.of(repeat) for repeat in row.repeats]
    return [value for value in values if value is not None]


def _noise(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return the difference of means that noise explains, as a share of the old mean."""
    if min(len(before), len(after)) < 2:
        return None
    error = sqrt(variance(before) / len(before) + variance(after) / len(after))
    return STANDARD_ERRORS * error / abs(fmean(before))
