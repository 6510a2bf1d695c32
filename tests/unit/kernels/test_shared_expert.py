"""A shared expert against transformers' Qwen3.5, as the last of the experts and as an FFN of its own."""

import pytest
import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.elementwise.elementwise import silu_mul
from lowlat.kernels.reference.gemm.linear import linear
from lowlat.kernels.reference.moe.experts import experts_down, experts_gate_up, router
from lowlat.kernels.reference.recurrent.gates import add_gated

EXPERTS, CHOSEN, HIDDEN, INNER, ROWS = 12, 3, 40, 24, 19


def make_block(shared_inner: int) -> torch.nn.Module:
    """Transformers' block with random weights."""
    qwen = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    config = pytest.importorskip("transformers").Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, shared_expert_intermediate_size=shared_inner,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
    )  # fmt: skip
    block: torch.nn.Module = qwen.Qwen3_5MoeSparseMoeBlock(config).eval()
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(std=0.3)
    return block


def run_experts(x: torch.Tensor, parts: dict[str, torch.Tensor], chosen: int, *, shared: bool) -> torch.Tensor:
    """The three operations over rows."""
    ids = torch.full((len(x), chosen), 99, dtype=torch.int32)
    shares, out = torch.full((len(x), chosen), torch.nan), torch.full(x.shape, torch.nan)
    activated = torch.full((len(x), chosen, INNER), torch.nan)
    router(x, parts["router"], expert_ids=ids, expert_weights=shares, shared=shared)
    experts_gate_up(x, ids, weight=parts["gate_up"], out=activated)
    experts_down(activated, ids, shares, weight=parts["down"], out=out)
    return out


def parts_of(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = block.state_dict()
    names = {"router": "gate.weight", "gate_up": "experts.gate_up_proj", "down": "experts.down_proj"}
    return {name: state[key] for name, key in names.items()}


def gate_and_up(block: torch.nn.Module) -> torch.Tensor:
    state = block.state_dict()
    return torch.cat([state[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up")])


def test_as_one_more_expert_it_is_transformers_qwen3_5() -> None:
    block, x = make_block(INNER), torch.randn(ROWS, HIDDEN)
    parts, state = parts_of(block), block.state_dict()
    more = {
        "router": state["shared_expert_gate.weight"],
        "gate_up": gate_and_up(block)[None],
        "down": state["shared_expert.down_proj.weight"][None],
    }
    stacked = {name: torch.cat([part, more[name]]) for name, part in parts.items()}
    with torch.no_grad():
        want = block(x[None])[0]
    torch.testing.assert_close(run_experts(x, stacked, CHOSEN + 1, shared=True), want, rtol=1e-5, atol=1e-5)


def test_as_an_ffn_of_another_size_it_is_transformers_qwen3_5() -> None:
    inner = 2 * INNER + 5
    block, x = make_block(inner), torch.randn(ROWS, HIDDEN)
    state, gate_up, out = block.state_dict(), torch.empty(ROWS, 2 * inner), torch.full((ROWS, HIDDEN), torch.nan)
    activated, shared, gate = torch.empty(ROWS, inner), torch.empty(ROWS, HIDDEN), torch.empty(ROWS, 1)
    linear(x, gate_and_up(block), out=gate_up)
    silu_mul(gate_up, out=activated)
    linear(activated, state["shared_expert.down_proj.weight"], out=shared)
    linear(x, state["shared_expert_gate.weight"], out=gate)
    add_gated(run_experts(x, parts_of(block), CHOSEN, shared=False), shared, gate, out=out)
    with torch.no_grad():
        torch.testing.assert_close(out, block(x[None])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("over_all", [False, True])
def test_a_shared_expert_changes_no_share_of_the_others(over_all: bool) -> None:
    x, weight, bias = torch.randn(5, 16), torch.randn(8, 16), torch.randn(8)
    live = torch.tensor([1, 1, 0, 1, 1], dtype=torch.uint8)
    found = {}
    for shared in (False, True):
        ids, shares = torch.full((5, 3 + shared), 99, dtype=torch.int32), torch.full((5, 3 + shared), torch.nan)
        rows = 7 + shared
        router(
            x, weight[:rows], bias[:rows], live, expert_ids=ids, expert_weights=shares, over_all=over_all, shared=shared
        )
        found[shared] = ids, shares
    ids, shares = found[True]
    assert torch.equal(ids[:, :3], found[False][0]) and torch.equal(shares[:, :3], found[False][1])
    assert ids[:, 3].tolist() == [7, 7, -1, 7, 7]
    want = torch.where(live > 0, torch.sigmoid(x @ weight[7] + bias[7]), 0)
    torch.testing.assert_close(shares[:, 3], want)


def test_a_row_must_choose_one_of_the_others_at_least() -> None:
    ids, shares = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1)
    with pytest.raises(ShapeError, match="1 experts a token of 8 experts, one of them shared"):
        router(torch.zeros(1, 16), torch.zeros(8, 16), expert_ids=ids, expert_weights=shares, shared=True)
