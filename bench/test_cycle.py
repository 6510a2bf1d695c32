"""Cycles of speculation: verify, accept, commit and draft again, which are one step of `Runtime.step`.

    python -m pytest bench/test_cycle.py --depth 2,3,5
    python -m pytest bench/test_cycle.py --geometry llama-8b --accept-length 3

`extra_info` tells tokens a cycle and acceptance; with random weights nothing but `--accept-length` makes drafts agree.
"""

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.samples import MEASURED, record
from bench.stage import Stage, suite_cases
from lowlat.tools.bench.scenarios import Case

pytestmark = MEASURED


def test_cycle(stage: Stage, cycle_case: Case, benchmark: BenchmarkFixture, pytestconfig: pytest.Config) -> None:
    samples, row = stage.steps(cycle_case, suite_cases("cycle_case", pytestconfig.option))
    assert row.eagle_speculation is not None and row.eagle_speculation.num_drafts > 0
    record(benchmark, samples, msgspec.to_builtins(row))
