"""Words that are not there yet, and how long they are waited for."""

import numpy as np
import pytest
import torch
from kernel_walk import Walker, walkable

from lowlat.kernels.common.sentinels import MISSING, SPIN_LIMIT


def test_a_missing_word_is_none_that_arithmetic_gives() -> None:
    with walkable(Walker(), "common.sentinels") as (sentinels,):
        for missing in (MISSING, 0xFFFF0000 | 0x3F80, 0x3F80 << 16 | 0xFFFF):
            assert sentinels.lacks_one(missing)
        nans = (torch.tensor([np.inf]) * 0, torch.tensor([-np.inf]) * 0)
        words = [int(each.view(torch.int32)) & MISSING for each in nans]
        for word in (0, 1, 0x7FFFFFFF, 0x7FFF7FFF, 0xFF80FF80, 0x80008000, 0x3F803F80, *words):
            assert not sentinels.is_missing(word)
        assert sentinels.is_missing(MISSING)


def test_a_wait_ends_the_launch_after_so_many_turns() -> None:
    with walkable(Walker(), "common.sentinels") as (sentinels,):
        assert sentinels.next_turn(0) == 1
        assert sentinels.next_turn(SPIN_LIMIT - 1) == SPIN_LIMIT
        with pytest.raises(AssertionError, match="gave up waiting"):
            sentinels.next_turn(SPIN_LIMIT)
