"""The memory of several ranks leaves and comes back together, or not at all."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from lowlat.errors import CapacityError, ConfigError, DeviceError
from lowlat.executors.residence.ranks import RankResidences
from lowlat.executors.residence.storages import StorageResidence

CPU = torch.device("cpu")


class Refusing(StorageResidence):
    """Memory that has a problem with one way."""

    def __init__(self, *, away: bool, problem: Exception) -> None:
        super().__init__(CPU)
        self.away, self.problem = away, problem

    def leave(self) -> None:
        if self.away:
            raise self.problem
        super().leave()

    def come_back(self) -> None:
        if not self.away:
            raise self.problem
        super().come_back()


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    yield


def test_ranks_leave_and_come_back_together() -> None:
    own = [StorageResidence(CPU) for _ in range(3)]
    held = [each.zeros((4,), torch.float32) for each in own]
    ranks = RankResidences([(CPU, each) for each in own])
    for _ in range(2):
        ranks.leave()
        assert [each.untyped_storage().nbytes() for each in held] == [0, 0, 0]
        ranks.come_back()
        assert all(each.tolist() == [0.0] * 4 for each in held)
    assert ranks.report().device_bytes == 48 and ranks.needed_host_bytes == 0
    with pytest.raises(ConfigError, match="of one rank"):
        ranks.zeros((1,), torch.float32)
    ranks.close()


@pytest.mark.parametrize("away", [True, False])
def test_one_that_is_refused_keeps_all_where_they_were(away: bool) -> None:
    own = [StorageResidence(CPU), Refusing(away=away, problem=CapacityError("full")), StorageResidence(CPU)]
    held = [each.zeros((4,), torch.float32) for each in own]
    ranks = RankResidences([(CPU, each) for each in own])
    if not away:
        ranks.leave()
    with pytest.raises(CapacityError, match="full"):
        (ranks.leave if away else ranks.come_back)()
    assert [each.untyped_storage().nbytes() for each in held] == [16 if away else 0] * 3


def test_a_device_that_fails_says_so() -> None:
    own = [StorageResidence(CPU), Refusing(away=True, problem=DeviceError("lost"))]
    with pytest.raises(DeviceError, match="lost"):
        RankResidences([(CPU, each) for each in own]).leave()
