"""The logits that experts are chosen by, on a card: promised bits, and a row's in any company; and what is awaited."""

import pytest
import torch
from rowwise_cases import (
    Lab,
    check_router,
    check_router_extremes,
    check_router_fills,
    route,
    router_inputs,
    same_bits,
)

from lowlat.executors.launcher import Launcher

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


@pytest.mark.parametrize("chunks", [1, 360, 2880])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_what_is_awaited_is_all_ones(lab: Lab, rows: int, chunks: int) -> None:
    check_router_fills(lab, rows, 2880, 128, chunks)
