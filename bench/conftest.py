"""Options of the suites in this folder."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--serving-out", type=Path, default=None, help="write what test_serving.py measured here, as JSON")
