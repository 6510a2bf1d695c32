"""The option of the suite in this folder, and the time that it takes."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lowlat", "lowlat's latency suite")
    group.addoption("--serving-out", type=Path, help="write what test_ipc.py measured here, as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the suite the time that its rounds take."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(3600))
