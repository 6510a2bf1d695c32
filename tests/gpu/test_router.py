"""The logits that experts are chosen by, and their sum, on a card: promised bits, and a row's in any company."""

import pytest
import torch
from rowwise_cases import (
    EPS,
    Lab,
    check_experts_sum,
    check_router,
    check_router_extremes,
    poison,
    route,
    router_inputs,
    same_bits,
)

from lowlat.executors.launcher import Launcher
from lowlat.kernels.experts_sum import experts_sum

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def lab() -> Lab:
    device = torch.device("cuda", 0)
    return Lab(device, Launcher(device).run)


@pytest.mark.parametrize(("width", "experts"), [(2880, 128), (2880, 32), (8, 3), (6144, 256)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 17, 64])
def test_the_router_in_its_promised_order(lab: Lab, rows: int, width: int, experts: int) -> None:
    check_router(lab, rows, width, experts)


@pytest.mark.parametrize("width", [64, 2880])
def test_what_is_not_finite(lab: Lab, width: int) -> None:
    check_router_extremes(lab, width)


@pytest.mark.parametrize("width", [2880, 5120])
def test_a_row_s_logits_have_the_same_bits_in_any_company(lab: Lab, width: int) -> None:
    options = router_inputs(64, width, 128)
    options["row_live"] = torch.ones(64, dtype=torch.uint8)
    together = route(lab, options)
    for part in ([0], [63], [7, 5], [3, 2, 1, 0], list(range(20, 31))):
        own = {**options, "x": options["x"][part], "row_live": options["row_live"][part]}
        alone = route(lab, own)
        assert same_bits(alone["normed"], together["normed"][part])
        assert torch.equal(alone["logits"], together["logits"][part])


@pytest.mark.parametrize(("width", "chosen"), [(2880, 4), (8, 1), (5120, 8), (2880, 5)])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_the_sum_against_the_reference(lab: Lab, rows: int, width: int, chosen: int) -> None:
    check_experts_sum(lab, rows, width, chosen)


def test_a_sum_has_the_same_bits_alone(lab: Lab) -> None:
    rows, width, chosen = 9, 2880, 4
    options = {"residual": torch.randn(rows, width).bfloat16(), "partials": torch.randn(rows, chosen, width)}
    shared = {"norm_weight": torch.rand(width).bfloat16(), "eps": EPS}
    outs = {"total": poison(rows, width), "out": poison(rows, width)}
    together = lab.launch(experts_sum, outs, **options, **shared)
    for row in (0, 4, 8):
        own = {name: tensor[row : row + 1] for name, tensor in options.items()}
        alone = lab.launch(experts_sum, {key: poison(1, width) for key in outs}, **own, **shared, early=True)
        assert all(same_bits(alone[key][0], together[key][row]) for key in outs)
