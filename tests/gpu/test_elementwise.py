"""cast, add, silu_mul and add_gated on a GPU, against the reference on the CPU."""

import pytest
import torch
from rowwise_cases import Lab, check_elementwise, check_markov_heads, check_per_layer, poison, same_bits

from lowlat.kernels.elementwise.elementwise import add_gated, silu_mul


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1032), (5, 14336), (64, 2880)])
def test_against_the_reference(lab: Lab, rows: int, width: int) -> None:
    check_elementwise(lab, rows, width)
    check_markov_heads(lab, rows, width, 64)


@pytest.mark.parametrize(("layers", "size"), [(42, 256), (3, 24), (2, 2048)])
def test_inputs_of_layers_against_the_reference(lab: Lab, layers: int, size: int) -> None:
    check_per_layer(lab, 5, layers, size)


def test_extreme_gates(lab: Lab) -> None:
    gates = torch.tensor([0.0, -0.0, 1e-30, -87.0, -89.0, -1e4, 88.0, 1e30, float("inf"), -torch.inf, torch.nan])
    gate_up = torch.zeros(1, 32)
    gate_up[0, :11], gate_up[0, 16:] = gates, 2.0
    found = lab.launch(silu_mul, {"out": poison(1, 16)}, gate_up=gate_up)["out"].float().cpu()[0, :11]
    expected = (gates.double() * torch.sigmoid(gates.double()) * 2).float()
    assert torch.equal(found.isnan(), torch.isnan(gates) | (gates == -torch.inf))
    torch.testing.assert_close(found[:9], expected[:9], rtol=1e-2, atol=1e-35)


def test_extreme_gates_of_a_shared_expert(lab: Lab) -> None:
    gate = torch.tensor([[0.0], [-0.0], [-87.0], [-200.0], [88.0], [1e30], [float("inf")], [-torch.inf], [torch.nan]])
    one, outs = torch.ones(9, 8), {"out": poison(9, 8, dtype=torch.float32)}
    found = lab.launch(add_gated, outs, a=one * 0, b=one, gate=gate)["out"].cpu()
    torch.testing.assert_close(found, torch.sigmoid(gate).expand(9, 8), rtol=1e-6, atol=1e-37, equal_nan=True)


def test_a_row_alone_has_the_same_bits(lab: Lab) -> None:
    gate_up = torch.randn(9, 2 * 2880) * 4
    together = lab.launch(silu_mul, {"out": poison(9, 2880)}, gate_up=gate_up)["out"]
    for row in (0, 4, 8):
        alone = lab.launch(silu_mul, {"out": poison(1, 2880)}, gate_up=gate_up[row : row + 1])["out"]
        assert same_bits(alone[0], together[row])
