"""The start of a step in the simulator."""

import pytest
import torch
from begin_step_cases import Looks, check_begin_step, check_handed, check_opening, check_wait
from kernel_cases import Bench, simulate

from lowlat.kernels.step import begin_step
from lowlat.kernels.toolchain import ptx

BENCH = Bench(torch.device("cpu"), simulate)


@pytest.mark.parametrize("seed", range(12))
def test_against_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sizes = 1 + seed % 3, {"num_commands": seed % 5, "context": 30}
    monkeypatch.setattr(begin_step, "THREADS", 64)  # of two slots; of three there are more
    monkeypatch.setattr(begin_step, "MOST_THREADS", 96)
    how = ("fused", "alone", "given")[seed % 4 % 3]
    check_begin_step(BENCH, seed * 7, batch=batch, max_batch=batch + seed % 2, **sizes, how=how)


def test_a_draft_length_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """After commands, too; the condition of the SWITCH node is what is chosen."""
    decided: list[tuple[int, int]] = []
    monkeypatch.setattr(begin_step, "THREADS", 96)
    monkeypatch.setattr(ptx, "set_graph_condition", lambda handle, value: decided.append((int(handle), int(value))))
    sizes = {"context": 30, "condition": 77}
    chosen = [
        check_opening(BENCH, seed * 7, batch=1 + seed % 3, max_batch=3, num_commands=seed % 4, **sizes)
        for seed in range(16)
    ]
    assert decided == [(77, choice) for choice in chosen] and len(set(chosen)) > 3


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_handed_over_first(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin_step, "THREADS", 96)
    check_handed(BENCH, seed * 7, batch=1 + seed % 3)


@pytest.mark.parametrize("seed", range(4))
def test_rows_wait_for_what_a_grammar_forces(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, load = Looks(), ptx.load_acquire_system

    def look(address: int) -> int:
        looks.see()
        return int(load(address))

    monkeypatch.setattr(begin_step, "THREADS", 96)
    monkeypatch.setattr(ptx, "load_acquire_system", look)
    check_wait(BENCH, seed, looks)
    assert looks.count >= 3
