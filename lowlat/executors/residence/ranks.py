"""This module moves the memory of several ranks off their devices and back, all ranks together."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from lowlat.errors import CapacityError, ConfigError
from lowlat.executors.residence.base import Residence, ResidenceReport

__all__ = ["RankResidences"]


class RankResidences(Residence):
    """Joins the residences of all ranks, in order. Each tensor lies in the residence of its rank."""

    def __init__(self, ranks: Sequence[tuple[torch.device, Residence]]) -> None:
        self._ranks = tuple(ranks)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Raise ConfigError: only the residence of a rank holds tensors."""
        raise ConfigError("a tensor lies in the residence of one rank")

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Raise ConfigError: only the residence of a rank holds tensors."""
        raise ConfigError("a tensor lies in the residence of one rank")

    @property
    def needed_host_bytes(self) -> int:
        """See Residence."""
        return sum(own.needed_host_bytes for _, own in self._ranks)

    def leave(self) -> None:
        """See Residence; if one rank is refused memory, the ranks that have left come back."""
        self._change(away=True)

    def come_back(self) -> None:
        """See Residence; if one rank is refused memory, the ranks that are back leave again."""
        self._change(away=False)

    def report(self) -> ResidenceReport:
        """The bytes of all ranks together."""
        each = [own.report() for _, own in self._ranks]
        return ResidenceReport(sum(one.device_bytes for one in each), sum(one.host_bytes for one in each))

    def bytes_by_device(self) -> dict[str, int]:
        """See Residence; ranks may share a device."""
        found = Counter[str]()
        for _, own in self._ranks:
            found.update(own.bytes_by_device())
        return dict(found)

    def close(self) -> None:
        """See Residence."""
        for device, own in self._ranks:
            with torch.cuda.device(device):
                own.close()

    def _change(self, *, away: bool) -> None:
        """Move all ranks in parallel: each device has its own bus."""
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            moves = [pool.submit(_move, device, own, away=away) for device, own in self._ranks]
            problems = [move.exception() for move in moves]
        failed = [problem for problem in problems if problem is not None]
        if not failed:
            return
        if all(isinstance(problem, CapacityError) for problem in failed):
            for (device, own), problem in zip(self._ranks, problems, strict=True):
                if problem is None:
                    _move(device, own, away=not away)
            raise failed[0]
        raise next(problem for problem in failed if not isinstance(problem, CapacityError))


def _move(device: torch.device, residence: Residence, *, away: bool) -> None:
    with torch.cuda.device(device):
        if away:
            residence.leave()
        else:
            residence.come_back()
