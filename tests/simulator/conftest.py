"""These tests run integer kernels in Numba's simulator, which must be chosen before Numba is imported.

`tests/unit/kernels/test_simulated.py` runs them in a process of its own.
"""

import os
from collections.abc import Iterator

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
collect_ignore_glob = [] if SIMULATED else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def fibers() -> Iterator[None]:
    """Blocks run as tests/support/simulated_blocks.py says."""
    from simulated_blocks import fibers_for_threads  # it imports the simulator

    undo = fibers_for_threads()
    yield
    undo()
