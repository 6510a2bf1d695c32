"""Prefill's own operations, which a card runs, on the CPU against what they mean."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowered import Pair
from prefill_cases import NAMES, chunk_differences, make_named
from prefill_stand_ins import flash_attention, gather
from tiny_models import mxfp4_target

from lowlat.executors.prefill import flash
from lowlat.executors.prefill import kernels as prefill_kernels
from lowlat.executors.prefill.experts import choose_by_torch, down_by_torch, gate_up_by_torch
from lowlat.executors.prefill.room import ExpertsRoom, room_of
from lowlat.kernels.formats.mxfp4 import quantise
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.packing import PackedExperts, pack_experts, unpack_expert
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.moe import experts as reference
from lowlat.kernels.toolchain.kernel import H200
from lowlat.step.prefill import build_prefill

BF16 = torch.bfloat16
NAN = float("nan")


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (found.double() - expected.double()).norm()
    return bool(difference <= tolerance * expected.double().norm())


def random_experts(rows: int, columns: int, quantised: bool, order: torch.Tensor | None) -> tuple[Any, PackedExperts]:
    """Seven experts: their canonical weights, as the reference takes them, and packed."""
    matrices = (torch.randn(7, rows, columns) / columns**0.5).to(BF16)
    if not quantised:
        return {"weight": matrices}, pack_experts({"weight": matrices}, order=order)
    blocks, scales = quantise(matrices)
    return {"blocks": blocks, "scales": scales}, pack_experts({"blocks": blocks, "scales": scales}, order=order)


def choices(kind: str, rows: int) -> torch.Tensor:
    """Two of seven experts a row: at random, all rows alike, or one expert in every row."""
    if kind == "alike":
        return torch.tensor([[5, 2]] * rows, dtype=torch.int32)
    if kind == "one":
        return torch.tensor([[3, row % 3] for row in range(rows)], dtype=torch.int32)
    if kind == "dead":
        return torch.tensor([[row % 7, 6 - row % 2] if row % 3 else [-1, -1] for row in range(rows)], dtype=torch.int32)
    return torch.stack([torch.randperm(7)[:2] for _ in range(rows)]).int()


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "mxfp4"])
@pytest.mark.parametrize("kind", ["random", "alike", "one", "dead"])
def test_experts_of_a_chunk_are_the_reference_s(kind: str, quantised: bool) -> None:
    torch.manual_seed(4)
    rows, width, inner = 67, 96, 64
    ids, shares = choices(kind, rows), torch.softmax(torch.randn(rows, 2), 1)
    x = torch.randn(rows, width).to(BF16)
    weights, packed = random_experts(2 * inner, width, quantised, gate_up_permutation(inner))
    bias = torch.randn(7, 2 * inner).to(BF16)
    found, expected = torch.full((2, rows, 2, inner), NAN, dtype=BF16)
    limits: dict[str, Any] = {"limit": 1.5, "alpha": 1.702}
    reference.experts_gate_up(x, ids, bias, **weights, out=expected, **limits)
    gate_up_by_torch(x, ids, experts=packed, bias=bias, out=found, **limits)
    assert close(found, expected, 2e-3)
    weights, packed = random_experts(width, inner, quantised, None)
    bias = torch.randn(7, width).to(BF16)
    found, wanted = torch.full((2, rows, width), NAN)
    reference.experts_down(expected, ids, shares, bias, **weights, out=wanted)
    down_by_torch(expected, ids, shares, experts=packed, bias=bias, out=found)
    assert close(found, wanted, 1e-5)


def test_the_choice_of_a_chunk_is_the_reference_s() -> None:
    torch.manual_seed(5)
    x, weight, bias = torch.randn(19, 64).to(BF16), torch.randn(9, 64).to(BF16), torch.randn(9).to(BF16)
    weight[7], bias[7] = weight[2], bias[2]
    found: dict[str, Any] = {"expert_ids": torch.zeros(19, 4, dtype=torch.int32), "expert_weights": torch.zeros(19, 4)}
    expected = {name: tensor.clone() for name, tensor in found.items()}
    live = (torch.arange(19) % 5 != 2).to(torch.uint8)
    choose_by_torch(x, weight, bias, live, **found, chunk=19)
    reference.router(x, weight, bias, live, **expected)
    assert (found["expert_ids"] == -1).any() and (found["expert_ids"] >= 0).any()
    assert torch.equal(found["expert_ids"], expected["expert_ids"])
    assert close(found["expert_weights"], expected["expert_weights"], 1e-5)


@pytest.mark.parametrize("live", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_is_the_reference_s(name: str, live: int | None, tmp_path: Path) -> None:
    """The whole prefill program, experts from packed matrices: what it leaves in caches and features."""
    torch.manual_seed(7)
    found = chunk_differences(make_named(name, tmp_path), torch.device("cpu"), live=live)
    assert len(found) > (4 if live is None else 3)  # no block is full of three rows, so no feature is kept
    for buffer, differences in found.items():
        assert float(differences.max()) < 4e-2, buffer


def test_the_room_for_experts_is_that_of_one_layer_s_lists_and_products(tmp_path: Path) -> None:
    mxfp4_target(tmp_path, num_local_experts=9, num_experts_per_tok=4, hidden_size=64, intermediate_size=96)
    pair = Pair(tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=96)
    room = room_of(build_prefill(pair.geometry), lambda name: pair.source[name].shape).experts
    assert room == ExpertsRoom(96 * 4, 96 * 4 // 64 + 9, 96 * 4 * 64, 96 * 9)
    assert room.num_bytes == 4 * 96 * 4 + 256 + 4 * 96 * 4 * 64 + (4 * 96 * 9 + 128)
    memory = torch.zeros(room.num_bytes + 7, dtype=torch.uint8)
    order, tiles, values, logits = room.cut(memory)
    assert (order.shape, tiles.shape, values.shape, logits.shape) == ((384,), (15, 4), (384 * 64,), (96 * 9,))
    for part in (order, tiles, values, logits):
        assert not part.any()
        part.fill_(1)
    assert logits.data_ptr() + 4 * logits.numel() == memory.data_ptr() + room.num_bytes - 128 and not memory[-7:].any()
    step = room_of(pair.program(0, 1), lambda name: pair.source[name].shape)
    assert step.num_bytes == 0  # a step has others
    assert not any(part.numel() for part in (*step.experts.cut(memory), *step.attention.cut(memory)))


def test_the_room_for_attention_is_that_of_the_widest_layer(tmp_path: Path) -> None:
    """Experts' and attention's parts lie side by side; a layer with a window takes fewer rows."""
    mxfp4_target(tmp_path, num_hidden_layers=2, sliding_window=20, hidden_size=64, head_dim=64)
    pair = Pair(tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=32, max_context=1000)
    program, config = build_prefill(pair.geometry), pair.target.config
    room = room_of(program, lambda name: pair.source[name].shape)
    row_bytes = config.num_kv_heads * config.head_dim * pair.geometry.dtype.itemsize
    assert room.attention.keys_bytes == 1031 * row_bytes
    experts, attention, products = room.cut(torch.zeros(room.num_bytes + 9, dtype=torch.uint8))
    assert (experts.numel(), attention.numel()) == (room.experts.num_bytes, room.attention.num_bytes)
    assert products.numel() == room.products.num_bytes
    keys, values, lengths = room.attention.cut(attention)
    assert (keys.numel(), values.numel(), lengths.shape) == (1031 * row_bytes, 1031 * row_bytes, (2, 2))
    for part in (keys, values, lengths):
        assert not part.any()
        part.fill_(1)
    windowed = tuple(op for op in program.ops if op.kind != "prefill_attention" or op.params.get("window"))
    assert 0 < len(program.ops) - len(windowed) < 2
    alone = room_of(replace(program, ops=windowed), lambda name: pair.source[name].shape)
    assert alone.attention.keys_bytes == (32 + 19 + 127) * row_bytes


class StandInLauncher:
    """In place of a launcher: its launches do by torch what kernels mean."""

    card = H200

    def __init__(self, pair: Pair) -> None:
        self._pair, self.compiled = pair, 0
        self.kernels: list[str] = []
        self._ids = torch.empty(0)

    def compile_ahead(self, calls: Any) -> int:
        self.compiled += len(list(calls))
        return 0

    def stream(self) -> str:
        return "stream"

    def prepare(self, call: Any) -> Any:
        name = call.kernel.name
        self.kernels.append(name)
        means: dict[str, Any] = {"experts_grouping": self._group, "experts_grouped_gate_up": self._gate_up}
        means |= {"experts_grouped_down": self._down, "add_ranks": self._add, "gather_kv": gather}
        means |= {"router": self._route, "route_top_k": self._choose}
        meaning = next(function for kind, function in means.items() if name.startswith(kind))

        def issue(stream: str) -> None:
            assert stream == "stream"
            meaning(*call.arguments)

        return SimpleNamespace(issue=issue)

    def _route(self, x: Any, norm: Any, live: Any, weight: Any, bias: Any, normed: Any, logits: Any, *_: Any) -> None:
        assert live == 0  # all rows are normed
        OPERATIONS["rms_norm"](x, norm, out=normed, eps=self._pair.target.config.rms_norm_eps)
        logits.copy_(normed.float() @ weight.float().t() + bias.float())

    def _choose(self, logits: Any, live: Any, ids: Any, shares: Any, rows: int) -> None:
        assert live.tolist() == [1] * rows
        largest = logits.topk(ids.shape[1])
        ids.copy_(largest.indices)
        shares.copy_(torch.softmax(largest.values, 1))

    def _group(self, ids: Any, order: Any, tiles: Any, count: int, tile_pairs: int, capacity: int) -> None:
        assert (count, tile_pairs, capacity) == (ids.numel(), 64, len(tiles)) and order.numel() == count
        order.copy_(ids.view(-1).sort(stable=True)[1])
        self._ids = ids

    def _gate_up(self, words: Any, _: Any, x: Any, order: Any, tiles: Any, *rest: Any) -> None:
        _, bias, out, limit, alpha = rest
        matrices, rows = self._matrices(words, order)
        assert rows is not None
        own = torch.empty_like(bias)
        own[:, rows] = bias
        reference.experts_gate_up(x, self._ids, own, weight=matrices, out=out, limit=limit, alpha=alpha)

    def _down(self, words: Any, _: Any, inputs: Any, order: Any, tiles: Any, *rest: Any) -> None:
        shares, bias, out, *_ = rest
        matrices, _ = self._matrices(words, order)
        for rank in range(self._ids.shape[1]):
            own = self._ids[:, rank].long()
            rows = torch.einsum("mni,mi->mn", matrices[own].float(), inputs[:, rank].float())
            out[:, rank] = shares[:, rank, None] * (rows + bias[own].float())

    def _add(self, partials: Any, ids: Any, out: Any, rows: int) -> None:
        assert torch.equal(ids, self._ids) and rows == len(ids)
        out.copy_(partials.sum(1))

    def _matrices(self, words: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert torch.equal(order, self._ids.view(-1).sort(stable=True)[1])  # this layer's
        layers = range(self._pair.target.config.num_layers)
        names = [f"layers.{layer}.experts.{part}" for layer in layers for part in ("gate_up", "down")]
        packed = next(each for each in map(self._pair.weights.experts, names) if each.words is words)
        return torch.stack([unpack_expert(packed, expert) for expert in range(packed.num_experts)]), packed.order


def test_a_chunk_s_experts_are_six_launches_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm before them included, and its attention one before torch's; what stands for the launches reads what
    they were given."""
    torch.manual_seed(7)
    monkeypatch.setattr(prefill_kernels, "ROW_KERNELS", {})  # the stand-in knows experts' products and attention alone
    monkeypatch.setattr(flash, "flash_attention", flash_attention)
    pair = make_named("mxfp4", tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=96)
    launcher: Any = StandInLauncher(pair)
    for buffer, differences in chunk_differences(pair, torch.device("cpu"), launcher).items():
        assert float(differences.max()) < 4e-2, buffer
    assert launcher.compiled == len(launcher.kernels) == 7 * pair.target.config.num_layers
