"""The integer kernels against their references in Numba's simulator: a process of its own, with the simulator on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_integer_kernels_in_the_simulator(repository: Path) -> None:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)  # its tests take no turns with ours
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/simulator"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
