"""Prefill's own operations, which a card runs, on the CPU against what they mean."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowered import Pair
from prefill_cases import NAMES, chunk_differences, make_named
from tiny_models import mxfp4_target

from lowlat.executors import prefill_kernels
from lowlat.executors.expansion import Expansion, expanded_size, has_few_rows, room_bytes
from lowlat.executors.prefill_experts import ChunkExperts, expand_by_kernel, expand_by_torch
from lowlat.kernels.expert_packing import PackedExperts, pack_experts, unpack_expert
from lowlat.kernels.kernel import H200
from lowlat.kernels.packing import gate_up_order
from lowlat.kernels.reference import experts as reference
from lowlat.kernels.reference.mxfp4 import quantise
from lowlat.prefill import build_prefill

BF16 = torch.bfloat16
NAN = float("nan")


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (found.double() - expected.double()).norm()
    return bool(difference <= tolerance * expected.double().norm())


def random_experts(rows: int, columns: int, quantised: bool, order: torch.Tensor | None) -> tuple[Any, PackedExperts]:
    """Seven experts: their canonical weights, as the reference takes them, and packed."""
    matrices = (torch.randn(7, rows, columns) / columns**0.5).to(BF16)
    if not quantised:
        return {"weight": matrices}, pack_experts(weight=matrices, order=order)
    blocks, scales = quantise(matrices)
    return {"blocks": blocks, "scales": scales}, pack_experts(blocks=blocks, scales=scales, order=order)


def choices(kind: str, rows: int) -> torch.Tensor:
    """Two of seven experts a row: at random, all rows alike, or one expert in every row."""
    if kind == "alike":
        return torch.tensor([[5, 2]] * rows, dtype=torch.int32)
    if kind == "one":
        return torch.tensor([[3, row % 3] for row in range(rows)], dtype=torch.int32)
    return torch.stack([torch.randperm(7)[:2] for _ in range(rows)]).int()


def chunk_of(num_experts: int, elements: int, together: int) -> ChunkExperts:
    """Room for so many experts at once, full of NaN."""
    size = Expansion(together, together * elements)
    room = torch.full((size.elements,), NAN, dtype=BF16)
    return ChunkExperts(size, room, torch.zeros(num_experts, dtype=torch.int32), expand_by_torch)


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "mxfp4"])
@pytest.mark.parametrize("kind", ["random", "alike", "one"])
@pytest.mark.parametrize("together", [1, 3, 7])
def test_experts_of_a_chunk_are_the_reference_s(kind: str, quantised: bool, together: int) -> None:
    torch.manual_seed(4)
    rows, width, inner = 67, 96, 64
    chunk = chunk_of(7, 2 * inner * width, together)
    ids, shares = choices(kind, rows), torch.softmax(torch.randn(rows, 2), 1)
    x = torch.randn(rows, width).to(BF16)
    weights, packed = random_experts(2 * inner, width, quantised, gate_up_order(inner))
    bias = torch.randn(7, 2 * inner).to(BF16)
    found, expected = torch.full((2, rows, 2, inner), NAN, dtype=BF16)
    limits: dict[str, Any] = {"limit": 1.5, "alpha": 1.702}
    reference.experts_gate_up(x, ids, bias, **weights, out=expected, **limits)
    chunk.choose(ids)
    chunk.gate_up(x, ids, experts=packed, bias=bias, out=found, **limits)
    assert close(found, expected, 2e-3)
    weights, packed = random_experts(width, inner, quantised, None)
    bias = torch.randn(7, width).to(BF16)
    found, wanted = torch.full((2, rows, width), NAN)
    reference.experts_down(expected, ids, shares, bias, **weights, out=wanted)
    chunk.down(expected, ids, shares, experts=packed, bias=bias, out=found)
    assert close(found, wanted, 1e-5)


def test_the_choice_of_a_chunk_is_the_reference_s() -> None:
    torch.manual_seed(5)
    x, weight, bias = torch.randn(19, 64).to(BF16), torch.randn(9, 64).to(BF16), torch.randn(9).to(BF16)
    weight[7], bias[7] = weight[2], bias[2]
    found: dict[str, Any] = {"expert_ids": torch.zeros(19, 4, dtype=torch.int32), "expert_weights": torch.zeros(19, 4)}
    expected = {name: tensor.clone() for name, tensor in found.items()}
    chunk_of(9, 1, 1).router(x, weight, bias, **found)
    reference.router(x, weight, bias, **expected)
    assert torch.equal(found["expert_ids"], expected["expert_ids"])
    assert close(found["expert_weights"], expected["expert_weights"], 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_is_the_reference_s(name: str, tmp_path: Path) -> None:
    """The whole prefill program, experts from packed matrices: what it leaves in caches and features."""
    torch.manual_seed(7)
    found = chunk_differences(make_named(name, tmp_path), torch.device("cpu"))
    assert len(found) > 4
    for buffer, differences in found.items():
        assert float(differences.max()) < 4e-2, buffer


def test_the_room_for_experts_is_bounded_and_that_of_their_largest_product(tmp_path: Path) -> None:
    mxfp4_target(tmp_path, num_local_experts=9, num_experts_per_tok=4, hidden_size=64, intermediate_size=96)
    pair = Pair(tmp_path)
    program = build_prefill(pair.geometry)
    size = expanded_size(program, pair.source.__getitem__)
    assert (size.count, size.elements) == (9, 9 * 192 * 64)
    assert expanded_size(pair.program(0, 1), pair.source.__getitem__).num_bytes == 0  # a step expands none


class StandInLauncher:
    """In place of a launcher: its launches do by the reference what the step's products mean."""

    card = H200

    def __init__(self, pair: Pair) -> None:
        self._pair, self.compiled = pair, 0
        self.kernels: list[str] = []

    def compile_ahead(self, calls: Any) -> int:
        self.compiled += len(list(calls))
        return 0

    def stream(self) -> str:
        return "stream"

    def prepare(self, call: Any) -> Any:
        self.kernels.append(call.kernel.name)

        def issue(stream: str) -> None:
            assert stream == "stream"
            words, _, inputs, ids, shares, bias, out, pairs, limit, alpha = call.arguments
            assert ids.numel() == pairs
            matrices, order = self._matrices(words)
            if isinstance(shares, torch.Tensor):
                for rank in range(ids.shape[1]):
                    own = ids[:, rank].long()
                    rows = torch.einsum("mni,mi->mn", matrices[own].float(), inputs[:, rank].float())
                    out[:, rank] = shares[:, rank, None] * (rows + bias[own].float())
                return
            own = torch.empty_like(bias)
            own[:, order] = bias
            reference.experts_gate_up(inputs, ids, own, weight=matrices, out=out, limit=limit, alpha=alpha)

        return SimpleNamespace(issue=issue)

    def _matrices(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        layers = range(self._pair.target.config.num_layers)
        names = [f"layers.{layer}.experts.{part}" for layer in layers for part in ("gate_up", "down")]
        packed = next(each for each in map(self._pair.weights.experts, names) if each.words is words)
        return torch.stack([unpack_expert(packed, expert) for expert in range(packed.num_experts)]), packed.order


def test_few_rows_take_the_step_s_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for the launches reads what they were given; 96 rows of four experts are two launches a product."""
    torch.manual_seed(7)
    monkeypatch.setattr(prefill_kernels, "ROW_KERNELS", {})  # the stand-in knows experts' products alone
    pair = make_named("mxfp4", tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=96)
    launcher: Any = StandInLauncher(pair)
    for buffer, differences in chunk_differences(pair, torch.device("cpu"), launcher).items():
        assert float(differences.max()) < 4e-2, buffer
    assert launcher.compiled == len(launcher.kernels) == 2 * 2 * pair.target.config.num_layers
    program = build_prefill(pair.geometry)
    assert has_few_rows(program) and room_bytes(program, pair.source.__getitem__) == 96 * 4 * 64 * 4


def test_launches_of_an_expansion_are_made_once_for_each_part_of_the_list() -> None:
    """The kernel is asked for the experts in a part of the list, with the packed rows' order, into the room."""
    _, packed = random_experts(32, 64, True, gate_up_order(16))
    issued: list[tuple[str, list[int], int]] = []

    def prepare(call: Any) -> Any:
        words, scales, order, ids, out = call.arguments
        assert words is packed.words and scales is packed.scales
        assert torch.equal(order, gate_up_order(16).int())
        assert call.grid == (len(ids), 1, 1)  # two tiles, of eight a block

        def issue(stream: str) -> None:
            issued.append((stream, ids.tolist(), out.data_ptr()))

        prepared.append(call)
        return SimpleNamespace(issue=issue)

    prepared: list[Any] = []
    launcher: Any = SimpleNamespace(
        device=torch.device("cpu"), prepare=prepare, compile_ahead=len, stream=lambda: "stream"
    )
    ids, room = torch.arange(6, -1, -1, dtype=torch.int32), torch.zeros(3 * 32 * 64, dtype=BF16)
    expand = expand_by_kernel(launcher, {"up": packed}, ids, room)
    assert len(prepared) == 1 and not issued
    for part in (slice(0, 3), slice(3, 5), slice(0, 3)):
        expand(packed, ids[part], room[: 32 * 64 * (part.stop - part.start)].view(-1, 32, 64))
    assert [each[1] for each in issued] == [[6, 5, 4], [3, 2], [6, 5, 4]]
    assert {each[2] for each in issued} == {room.data_ptr()} and len(prepared) == 3
