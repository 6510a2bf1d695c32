"""This module computes intervals of a statistic by the bootstrap: it draws samples again, with replacement.

Source: B. Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 7 (1979);
the percentile method.
"""

from collections.abc import Callable

import torch

__all__ = ["DRAWS", "INTERVAL", "block_sums", "bootstrap"]

DRAWS = 2000
INTERVAL = (0.025, 0.975)
Statistic = Callable[[torch.Tensor], torch.Tensor]


def bootstrap(count: int, statistic: Statistic, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of a statistic over `count` samples.

    statistic  takes indices [draws, count] int64 of samples, and returns [draws] values
    Raises ValueError if there is no sample.
    """
    if count < 1:
        raise ValueError("a bootstrap needs at least one sample")
    drawn = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))
    low, high = torch.quantile(statistic(drawn).double(), torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return low, high


def block_sums(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return sums of values [n] over blocks of neighbours, which are not independent; the last block may be short."""
    return torch.stack([part.sum() for part in values.split(block)])
