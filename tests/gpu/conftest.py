"""What tests on a card share: their marker, and the launchers that run kernels there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_cases import Bench
from needed_cards import need_cards
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


@pytest.fixture(params=["one card", "two cards"])
def rank_cards(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    """The cards of two ranks: the first one for both, or the first two."""
    cards = [torch.device("cuda", 0), torch.device("cuda", int(request.param == "two cards"))]
    need_cards(cards[1].index + 1)
    yield cards
    for card in cards:
        torch.cuda.synchronize(card)


@pytest.fixture(scope="module")
def bench(launcher: Launcher) -> Bench:
    """Compares kernels with references, bit for bit."""
    return Bench(launcher.device, launcher.run)


@pytest.fixture(scope="module")
def lab(launcher: Launcher) -> Lab:
    """Compares row-wise kernels with references."""
    return Lab(launcher.device, launcher.run)
