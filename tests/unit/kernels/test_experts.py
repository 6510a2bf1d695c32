"""Router and experts against transformers' gpt-oss, and the independence of a row's bits."""

from typing import Any

import pytest
import torch

from lowlat.errors import ShapeError
from lowlat.kernels.formats.mxfp4 import dequantise, quantise
from lowlat.kernels.reference.moe.experts import experts_down, experts_gate_up, router

NAN = float("nan")


class Layer:
    """Random weights of one MoE layer, and its three operations in a row."""

    def __init__(self, experts: int, chosen: int, hidden: int, inner: int, *, packed: bool = False) -> None:
        self.chosen, self.inner, self.packed = chosen, inner, packed
        self.router_weight, self.router_bias = torch.randn(experts, hidden), torch.randn(experts)
        self.gate_up = torch.randn(experts, 2 * inner, hidden)
        self.gate_up_bias = torch.randn(experts, 2 * inner)
        self.down = torch.randn(experts, hidden, inner) / inner**0.5
        self.down_bias = torch.randn(experts, hidden)

    def weights(self, matrix: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        if not self.packed:
            return {"weight": matrix.to(device)}
        blocks, scales = quantise(matrix)
        return {"blocks": blocks.to(device), "scales": scales.to(device)}

    def run(self, x: torch.Tensor, live: torch.Tensor | None = None, block: int = 8) -> dict[str, torch.Tensor]:
        rows, device = x.shape[0], x.device
        ids = torch.full((rows, self.chosen), 99, dtype=torch.int32, device=device)
        shares = torch.full((rows, self.chosen), NAN, device=device)
        activated = torch.full((rows, self.chosen, self.inner), NAN, dtype=x.dtype, device=device)
        out = torch.full((rows, x.shape[1]), NAN, device=device)
        weight, bias = self.router_weight.to(device), self.router_bias.to(device)
        router(x, weight, bias, live, expert_ids=ids, expert_weights=shares, row_block=block)
        gate_up: dict[str, Any] = self.weights(self.gate_up, device)
        bias = self.gate_up_bias.to(device)
        experts_gate_up(x, ids, bias, out=activated, limit=7.0, alpha=1.702, row_block=block, **gate_up)
        down: dict[str, Any] = self.weights(self.down, device)
        experts_down(activated, ids, shares, self.down_bias.to(device), out=out, row_block=block, **down)
        return {"ids": ids, "shares": shares, "activated": activated, "out": out}


@pytest.mark.parametrize("block", [8, 21])
def test_it_is_transformers_gpt_oss(block: int) -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = pytest.importorskip("transformers").GptOssConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=6, num_experts_per_tok=3
    )
    theirs, layer = gpt_oss.GptOssMLP(config).eval(), Layer(6, 3, 48, 40)
    alternating = torch.arange(80).reshape(2, 40).t().reshape(-1)
    with torch.no_grad():
        theirs.router.weight.copy_(layer.router_weight)
        theirs.router.bias.copy_(layer.router_bias)
        # theirs alternates gate and up; ours has all gates first
        theirs.experts.gate_up_proj.copy_(layer.gate_up[:, alternating].transpose(1, 2))
        theirs.experts.gate_up_proj_bias.copy_(layer.gate_up_bias[:, alternating])
        theirs.experts.down_proj.copy_(layer.down.transpose(1, 2))
        theirs.experts.down_proj_bias.copy_(layer.down_bias)
        x = torch.randn(21, 48) * 3  # gates beyond the limit too
        expected, shares = theirs(x[None])
        _, _, ids = theirs.router(x)
    got = layer.run(x, block=block)
    assert torch.equal(got["ids"].long(), ids)
    torch.testing.assert_close(got["shares"], shares, rtol=1e-5, atol=1e-6)
    error = (got["out"] - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
    assert float(error.max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "inner", "packed"), [(5, 21, False), (9, 40, False), (6, 32, True)])
def test_a_row_has_the_same_bits_in_any_company(
    experts: int, inner: int, packed: bool, dtype: torch.dtype, device: str
) -> None:
    layer = Layer(experts, 3, 32, inner, packed=packed)
    row = torch.randn(32).to(device, dtype)
    alone = layer.run(row[None])
    for rows in (2, 8, 11):
        for place in sorted({0, 1, rows // 2, rows - 1}):
            x = torch.randn(rows, 32).mul(3).to(device, dtype)
            live = torch.randint(0, 2, (rows,), dtype=torch.uint8, device=device)
            x[place], live[place] = row, 1
            x[live == 0] = NAN
            got = layer.run(x, live)
            for name, value in got.items():
                assert torch.equal(value[place], alone[name][0]), (name, rows, place)
            dead = live == 0
            assert bool((got["ids"][dead] == -1).all())
            for name in ("shares", "activated", "out"):
                assert bool((got[name][dead] == 0).all()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_equal_the_expanded_ones(dtype: torch.dtype) -> None:
    packed = Layer(4, 2, 64, 32, packed=True)
    plain = Layer(4, 2, 64, 32)
    plain.__dict__.update(packed.__dict__, packed=False)
    plain.gate_up = dequantise(*quantise(packed.gate_up), torch.float32)
    plain.down = dequantise(*quantise(packed.down), torch.float32)
    x = torch.randn(10, 64).to(dtype)
    for name, value in packed.run(x).items():
        assert torch.equal(value, plain.run(x)[name]), name


def test_equal_logits_choose_the_lowest_ids() -> None:
    layer = Layer(7, 4, 32, 8)
    layer.router_weight.zero_()
    layer.router_bias.copy_(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.0, 1.0]))
    ids = layer.run(torch.randn(9, 32))["ids"]
    assert ids.tolist() == [[1, 3, 0, 2]] * 9


def test_extreme_rows_stay_finite_and_errors_are_named() -> None:
    layer = Layer(4, 2, 32, 16)
    got = layer.run(torch.stack((torch.full((32,), 1e30), torch.full((32,), -1e30), torch.zeros(32))))
    assert bool(got["shares"].isfinite().all())
    assert not bool(got["activated"].isnan().any())
    ids, bias = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(4, 32)
    with pytest.raises(ShapeError, match="blocks and scales"):
        experts_gate_up(torch.zeros(1, 32), ids, bias, out=torch.zeros(1, 2, 16), limit=7.0, alpha=1.0)
    weight = torch.zeros(4, 32, 24)
    with pytest.raises(ShapeError, match="x must have shape"):
        experts_gate_up(torch.zeros(1, 32), ids, weight=weight, out=torch.zeros(1, 2, 16))
    with pytest.raises(ShapeError, match="out must have shape"):
        experts_down(torch.zeros(1, 2, 24), ids, torch.ones(1, 2), weight=weight, out=torch.zeros(1, 30))
    with pytest.raises(ShapeError, match="5 experts"):
        out = torch.zeros(1, 5)
        router(torch.zeros(1, 32), torch.zeros(4, 32), bias[:, 0], expert_ids=out.int(), expert_weights=out)
