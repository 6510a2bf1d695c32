"""The end of a step in the simulator."""

import pytest
import torch
from kernel_cases import Bench, simulate
from publish_cases import check_end, check_publish

from lowlat.kernels.step import publish
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain import ptx

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.mark.parametrize("drafting", ["no", "fused", "alone"])
def test_against_the_reference(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "THREADS", 32)
    for seed in range(0, 100, 8):
        check_publish(BENCH, seed, drafting=drafting, batch=1 + seed % 4)


@pytest.mark.parametrize("keeps", [False, True])
def test_features_are_kept_and_drafts_counted_beside(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "THREADS", 64)
    for seed in range(0, 100, 16):
        check_end(BENCH, seed, keeps=keeps, batch=1 + seed // 16 % 3)


@pytest.mark.parametrize(
    ("active", "budget", "stop", "again"),
    [([0, 1], 5, 0, 1), ([0, 0], 5, 0, 0), ([1, 1], 1, 0, 0), ([1, 0], 2, 0, 1), ([1, 0], 2, 1, 0)],
)
def test_a_loop_ends(active: list[int], budget: int, stop: int, again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[tuple[int, int]] = []
    monkeypatch.setattr(publish, "THREADS", 32)
    monkeypatch.setattr(ptx, "set_graph_condition", lambda handle, value: decided.append((int(handle), int(value))))
    left = torch.tensor([budget])
    loop = LoopControl(77, torch.tensor(active, dtype=torch.int32), left, torch.tensor([stop]))
    check_publish(BENCH, 3, drafting="fused", batch=2, loop=loop)
    assert decided == [(77, again)]
    assert left.tolist() == [budget - 1]
