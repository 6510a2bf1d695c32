"""Plain decode steps: from one step's outputs of `Runtime.step` to the next one's, requests side by side, no drafts.

python -m pytest bench/test_step.py --benchmark-save=step --benchmark-save-data
python -m pytest bench/test_step.py --geometry llama-8b --context 8192,32768 --batch 1,4
"""

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.samples import MEASURED, record
from bench.stage import Stage, suite_cases
from lowlat.tools.bench.scenarios import Case

pytestmark = MEASURED


def test_step(stage: Stage, step_case: Case, benchmark: BenchmarkFixture, pytestconfig: pytest.Config) -> None:
    samples, row = stage.steps(step_case, suite_cases("step_case", pytestconfig.option))
    assert row.eagle_speculation is None
    record(benchmark, samples, msgspec.to_builtins(row))
