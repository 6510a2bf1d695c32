"""Drafting that ends by confidence, in the simulator."""

from typing import Any

import pytest
import torch
from confidence_cases import CHOSEN_BY, ENDS, LEARNT_FROM, ROW, Depths, check_depths, check_nobody
from kernel_cases import Bench, simulate

from lowlat.errors import ShapeError
from lowlat.kernels.reference.speculation import depths
from lowlat.kernels.speculation.choose_depth import choose_depth
from lowlat.kernels.speculation.confidence import learn_confidence
from lowlat.kernels.toolchain import ptx

BENCH = Bench(torch.device("cpu"), simulate)


def test_steps_in_a_row() -> None:
    reached = check_depths(BENCH, 2, 50) | check_depths(BENCH, 5, 60)
    ends = {f"{what} at {end}" for what in ("on", "stop") for end in range(len(ENDS))}
    assert reached > {
        *ends,
        "least bound",
        "most bound",
        "limit",
        "dead",
        "forced drafts",
        "7 of 7",
        "0 of 1",
        "1 of 3",
    }


def test_a_step_for_nobody() -> None:
    check_nobody(BENCH)


def chosen_by(world: Depths) -> dict[str, Any]:
    """Arrays of `choose_depth` as they are before the first end of a first step."""
    for slot in (0, 2):
        world.join(slot)
    return {name: world.arrays[name] for name in CHOSEN_BY}


@pytest.mark.parametrize("high", [1, 5])
def test_both_conditions_are_set(high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[tuple[int, int]] = []
    monkeypatch.setattr(ptx, "set_graph_condition", lambda handle, value: decided.append((int(handle), int(value))))
    arrays = chosen_by(Depths(0))
    arrays["width_bounds"][:] = torch.tensor([high, high])
    (call,) = choose_depth(**arrays, row=ROW, end=0, depth=1, condition=77, further=78)
    assert call.arguments[-2:] == (77, 78) and not call.kernel.linked
    simulate(call)
    assert decided == [(77, high), (78, int(high > 1))]
    assert arrays["width_choice"].tolist() == [high]


def test_what_does_not_fit_is_refused() -> None:
    world, given = Depths(0), {"row": ROW, "end": 0, "depth": 1}
    arrays: dict[str, Any] = chosen_by(world)
    for name in set(arrays) - {"width_expected"}:  # by whose shape the others are checked
        wrong = {**arrays, name: arrays[name].new_zeros(*arrays[name].shape[:-1], arrays[name].shape[-1] + 1)}
        with pytest.raises(ShapeError):
            choose_depth(**{**wrong, **given})
    for other in ({"end": 3}, {"row": 2}, {"depth": 0}, {"depth": 6}, {"depth": 2}, {"condition": 0}, {"further": 0}):
        with pytest.raises(ShapeError):
            choose_depth(**{**arrays, **given, **other})
    learnt = {name: world.arrays[name] for name in LEARNT_FROM}
    for name in learnt:
        with pytest.raises(ShapeError):
            learn_confidence(**{**learnt, name: learnt[name].new_zeros(*learnt[name].shape[:-1], 17)})


def test_tokens_of_fewer_drafts_than_are_made_stay() -> None:
    """What an earlier end reckoned of them is what every later end begins with."""
    arrays = chosen_by(Depths(1))
    depths.choose_depth(**arrays, row=ROW, end=0, depth=1)
    before = arrays["draft_expected"].clone()
    arrays["draft_kinds"].fill_(4)
    simulate(*choose_depth(**arrays, row=ROW, end=1, depth=2))
    after = arrays["draft_expected"]
    assert torch.equal(after[:, :2], before[:, :2]) and torch.equal(after[1], before[1])
    assert (after[0, 2:] > before[0, 2:]).all()
