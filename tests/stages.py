"""Marks cases of a parametrised test for the second stage: those that cost much and rarely tell more than others.

It also lists the files that take longest with both stages: workers begin with them.
"""

from collections.abc import Container, Iterable
from typing import Any

import pytest

LONGEST = (
    "unit/kernels/test_compiled.py",
    "unit/test_lossless.py",
    "unit/test_bench_programs.py",
    "unit/test_tuning.py",
    "faults/test_clients.py",
    "unit/cli/test_cli_bench.py",
    "unit/test_packaging.py",
)


def later(*values: Any) -> Any:
    """A case of the second stage, by its parameters."""
    return pytest.param(*values, marks=pytest.mark.second)


def staged(cases: Iterable[Any], first: Container[Any]) -> list[Any]:
    """All cases, those that are not among the first marked for the second stage; a tuple is several parameters."""
    return [case if case in first else later(*(case if isinstance(case, tuple) else (case,))) for case in cases]
