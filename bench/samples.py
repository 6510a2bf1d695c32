"""This module gives pytest-benchmark times that were measured elsewhere: first tokens of rounds in turns.

pytest-benchmark takes a timer's reading before and after a call. `measured_time` is such a timer: it advances by each
sample, and by nothing else. So the plugin's statistics, storage and comparison are of our samples, one a round.

    pytestmark = MEASURED
    record(benchmark, samples_ms, {"moved_bytes": moved})
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.lib.clock import percentile

__all__ = ["MEASURED", "measured_time", "record"]

PERCENTILES = (("50", 50.0), ("99", 99.0), ("999", 99.9))
_elapsed = [0.0]


def measured_time() -> float:
    """Seconds of all samples so far."""
    return _elapsed[0]


MEASURED = pytest.mark.benchmark(timer=measured_time)


def record(benchmark: BenchmarkFixture, milliseconds: Sequence[float], extra: Mapping[str, Any]) -> None:
    """Give a benchmark its samples, at least one, and percentiles and `extra` as its `extra_info`."""
    waiting = iter(milliseconds)

    def take() -> None:
        _elapsed[0] += next(waiting) / 1e3

    _elapsed[0] = 0.0  # sums of many samples would cost digits
    benchmark.pedantic(take, rounds=len(milliseconds))  # type: ignore[no-untyped-call]
    figures = {f"ms_p{name}": round(percentile(milliseconds, percent), 6) for name, percent in PERCENTILES}
    benchmark.extra_info.update({**figures, "samples": len(milliseconds), **extra})
