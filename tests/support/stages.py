"""This module marks cases of parametrised tests for the second stage, or for wide runs: slow ones that find little.

It also lists the files that take longest with both stages, with which workers begin, and the files of the fast stage.
"""

from collections.abc import Container, Iterable
from typing import Any

import pytest

LONGEST = (
    "unit/kernels/test_compiled.py",
    "unit/test_drafting_table.py",
    "unit/test_lossless.py",
    "http/test_clients.py",
    "ipc/test_readme.py",
    "unit/kernels/test_attention_walk.py",
    "unit/test_tuning.py",
    "http/test_page.py",
    "faults/test_clients.py",
    "http/test_models.py",
    "unit/test_packaging.py",
)


# The files of `pytest -m fast`: a minute of what breaks first, the other stages not imported.
FAST = (
    *("unit/test_config.py", "unit/test_tree.py", "unit/test_request.py", "unit/test_serving_config.py"),
    *("unit/test_kvcache.py", "unit/test_scheduler.py", "unit/test_metrics.py", "unit/test_launching.py"),
    *("unit/test_formats.py", "unit/test_text_detokenizer.py", "unit/test_runtime.py", "unit/kernels/test_sample.py"),
    *("unit/checkpoint/test_checkpoint_configs.py", "ipc/test_wire.py", "ipc/test_endpoint.py"),
)


def is_fast(name: str) -> bool:
    """Whether a file, by its name below the tests' folder, is of the fast stage."""
    return name in FAST or name.startswith("examples/")


def later(*values: Any) -> Any:
    """Mark a case, by its parameters, for the second stage."""
    return pytest.param(*values, marks=pytest.mark.second)


def wide(*values: Any) -> Any:
    """Mark a case, by its parameters, for wide runs: a further combination or size of what both stages test."""
    return pytest.param(*values, marks=pytest.mark.wide)


def staged(cases: Iterable[Any], first: Container[Any], second: Container[Any] | None = None) -> list[Any]:
    """Mark all cases but the `first` for the second stage, or if `second` is given, all others for wide runs.

    A tuple is several parameters.
    """

    def marked(case: Any) -> Any:
        if case in first:
            return case
        mark = later if second is None or case in second else wide
        return mark(*(case if isinstance(case, tuple) else (case,)))

    return [marked(case) for case in cases]
