"""What tests of kernels share."""

import pytest
from compiled_examples import Compiled


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The examples of all kernels, compiled for all capabilities."""
    return Compiled(tmp_path_factory.mktemp("compiled"))
