"""The end of a step in the simulator."""

from typing import Any

import pytest
import torch
from kernel_cases import Bench, simulate
from publish_cases import check_publish

from lowlat.kernels import ptx, publish

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.mark.parametrize("drafting", ["no", "drafts", "tokens"])
def test_against_the_reference(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "THREADS", 32)
    for seed in range(12):
        check_publish(BENCH, seed, drafting=drafting != "no", assigning=drafting == "tokens", batch=1 + seed % 4)
