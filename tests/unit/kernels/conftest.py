"""What tests of kernels share."""

import os

import pytest
from compiled_examples import Compiled

COMPILING_S = 900  # whoever comes first compiles for all, and the others wait


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for compiled examples may be the one that compiles them."""
    for item in items:
        if "compiled" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(COMPILING_S))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The examples of all kernels, compiled for all capabilities."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Compiled(shared / "compiled")
