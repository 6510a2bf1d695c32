"""The parts that tests on a GPU share: their marker, and the launchers that run kernels there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_cases import Bench
from needed_gpus import need_gpus
from rowwise_cases import Lab

from lowlat.executors.launcher import Launcher


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs a CUDA device."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    """One launcher for all tests of a module."""
    return Launcher(torch.device("cuda", 0))


@pytest.fixture(params=["one GPU", "two GPUs"])
def rank_gpus(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    """The GPUs of two ranks: the first one for both, or the first two."""
    gpus = [torch.device("cuda", 0), torch.device("cuda", int(request.param == "two GPUs"))]
    need_gpus(gpus[1].index + 1)
    yield gpus
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


@pytest.fixture(scope="module")
def bench(launcher: Launcher) -> Bench:
    """Compares kernels with references, bit for bit."""
    return Bench(launcher.device, launcher.run)


@pytest.fixture(scope="module")
def lab(launcher: Launcher) -> Lab:
    """Compares row-wise kernels with references."""
    return Lab(launcher.device, launcher.run)
