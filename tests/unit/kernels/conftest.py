"""What tests of kernels share."""

import os

import pytest
from compiled_examples import Compiled


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The examples of all kernels, compiled for all capabilities."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Compiled(shared / "compiled")
