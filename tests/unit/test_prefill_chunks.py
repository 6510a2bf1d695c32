"""What a chunk of prefill sees and stores, by what its tensors hold: on the CPU against the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Pair
from prefill_cases import NAMES, make_named, make_prefill
from prefill_slots import BLOCK, HEADS, SIZE, Slot, close
from torch.utils._python_dispatch import TorchDispatchMode

from lowlat.executors.allocation import STATE_ROLES
from lowlat.executors.prefill.arguments import ChunkArguments
from lowlat.executors.prefill.kernels import ROW_KERNELS
from lowlat.executors.prefill.memory import temporary_bytes
from lowlat.executors.prefill.room import room_of
from lowlat.executors.prefill.rows import draft_prefill_rows
from lowlat.graphs import BufferSet
from lowlat.host.memory.plan import memory_need
from lowlat.kernels.reference.attention import kv
from lowlat.kernels.reference.rows import draft_rows as draft_rows
from lowlat.kernels.toolchain.kernel import H200
from lowlat.step.prefill import build_prefill

NAN = float("nan")
STARTS = (0, 32, 64, 96, 192, 224, 288)


@pytest.mark.parametrize("count", [SIZE, SIZE - 3, 1])
@pytest.mark.parametrize("window", [None, 1, 16, 40, 200])
@pytest.mark.parametrize("start", STARTS)
def test_attention_is_the_reference_s(start: int, window: int | None, count: int) -> None:
    slot = Slot(start, count)
    assert close(slot.attend(None, window=window), slot.expected(None, window=window), 8e-3)


@pytest.mark.parametrize("sinks", ["random", "large", "small"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("start", [0, 96, 288])
def test_sinks_take_their_share(start: int, window: int | None, sinks: str) -> None:
    slot = Slot(start, SIZE - 3)
    chosen = torch.full((HEADS,), -1e4 if sinks == "small" else 1e4) if sinks != "random" else torch.randn(HEADS) * 3
    found = slot.attend(chosen, window=window)
    assert close(found, slot.expected(chosen, window=window), 8e-3)
    if sinks == "large":
        assert not bool(found.any())
    if sinks == "small":
        assert close(found, slot.attend(None, window=window), 1e-6)


@pytest.mark.parametrize("window", [None, 40])
def test_a_chunk_s_bits_depend_on_its_prefix_alone(window: int | None) -> None:
    """Not on later entries of the table, where it lies, what others hold, or how many rows behind a row are live."""
    slot, other = Slot(96, SIZE), Slot(96, SIZE)
    found = slot.attend(None, window=window)
    moved = 1 + torch.randperm(len(other.caches[0]) - 1)[: other.table.shape[1]]
    caches = [torch.randn_like(cache) for cache in other.caches]
    for cache, source in zip(caches, other.caches, strict=True):
        cache[moved[:8]] = source[other.table[0, :8].long()]
    other.caches, other.table = caches, moved.int()[None]
    other.table[0, 8:] = 0
    assert torch.equal(other.attend(None, window=window), found)
    fewer = Slot(96, SIZE)
    fewer.count, fewer.chunk[1] = 9, 9
    assert torch.equal(fewer.attend(None, window=window), found[:9])


@pytest.mark.parametrize("count", [SIZE, SIZE - 1, 16, 15, 0])
@pytest.mark.parametrize("start", [0, 96, 288])
def test_the_head_s_rows_are_the_reference_s(start: int, count: int) -> None:
    torch.manual_seed(4)
    table = (1 + torch.randperm(40)[:20]).int()[None]
    chunk = torch.tensor([start, count], dtype=torch.int32)
    hidden, before = torch.randn(SIZE, 24), torch.randn(41, 24)
    features, shifted = (torch.stack((before, before)), torch.full((2, SIZE, 24), NAN))
    for place, function in enumerate((draft_prefill_rows, draft_rows.draft_prefill_rows)):
        function(hidden, chunk, table, block_features=features[place], shifted=shifted[place], block_size=BLOCK)
    assert torch.equal(features[0], features[1])
    assert torch.equal(shifted[0], shifted[1])
    assert torch.equal(features[0], before) == (count < BLOCK)


ASKING = tuple(f"aten::{name}" for name in ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal"))


class AskingIsAnError(TorchDispatchMode):
    """Raises for operations whose result, or whose shape, the host must wait for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        assert name not in ASKING, name
        if name.startswith("aten::index"):
            tensors = [each for each in args[1] if each is not None] if isinstance(args[1], (list, tuple)) else []
            assert all(each.dtype != torch.bool for each in tensors), name
        return func(*args, **(kwargs or {}))


def pair_of(name: str, directory: Path, **shape: Any) -> Pair:
    pair = make_named(name, directory)
    pair.geometry = replace(pair.geometry, **shape)
    return pair


def poisoned(buffers: BufferSet) -> None:
    """NaN in every cache, feature and scratch buffer."""
    for name, tensor in buffers.items():
        if buffers.specs[name].paging or name.startswith(("prefill.", "prefill_rows")):
            tensor.fill_(NAN if tensor.is_floating_point() else 0)


def test_a_chunk_asks_nothing_of_the_device(tmp_path: Path) -> None:
    """But where a card has a kernel."""
    pair = pair_of("llama", tmp_path)
    program = build_prefill(pair.geometry)
    program = replace(program, ops=tuple(op for op in program.ops if op.kind != "prefill_kv_write"))
    prefill, arguments, _ = make_prefill(pair, program, torch.device("cpu"))
    arguments.send()
    prefill.run()  # what is looked up once
    rows, live = torch.zeros(SIZE, 1, 1), torch.ones(SIZE, dtype=torch.uint8)
    table, cache = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 1, BLOCK, 1)
    with AskingIsAnError():
        prefill.run()
        with pytest.raises(AssertionError, match="nonzero"):
            kv.prefill_kv_write(rows, rows, live, table, table[0], k_cache=cache, v_cache=cache)
        with pytest.raises(AssertionError, match="item"), torch.inference_mode():
            table[0, live[0]]


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_of_dead_rows_keeps_nothing(name: str, tmp_path: Path) -> None:
    """So that a chunk can be tried before there is any."""
    pair = pair_of(name, tmp_path)
    prefill, arguments, buffers = make_prefill(pair, build_prefill(pair.geometry), torch.device("cpu"))
    poisoned(buffers)
    state = {key: buffers[key].clone() for key, spec in buffers.specs.items() if spec.paging}
    assert len(state) > 3
    arguments.send()
    prefill.run()
    for key, tensor in state.items():
        assert torch.equal(buffers[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_arguments_of_a_chunk_lie_in_one_block(tmp_path: Path) -> None:
    """What the host sees by name are parts of what one copy brings to the device; a set takes them as its own."""
    program = build_prefill(pair_of("llama", tmp_path).geometry)
    arguments = ChunkArguments(program, torch.device("cpu"))
    assert set(arguments.host) == {
        f"prefill_{part}" for part in ("tokens", "chunk", "live", "draft_live", "table", "positions", "draft_positions")
    }
    storages = {tensor.untyped_storage().data_ptr() for tensor in arguments.host.values()}
    assert len(storages) == 1
    for name, tensor in arguments.host.items():
        tensor.fill_(1)
        arguments.send()
        assert torch.equal(arguments.device[name], tensor)
    buffers = BufferSet(program.specs(*STATE_ROLES), torch.device("meta"), given=arguments.host)
    assert buffers["prefill_tokens"] is arguments.host["prefill_tokens"]
    assert buffers["lengths"].is_meta


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_row_wise_operations_are_one_launch_each(name: str, tmp_path: Path) -> None:
    """All that are in a program, over its own buffers; what the kernels do is told by their own tests."""
    pair = pair_of(name, tmp_path)
    program, calls = build_prefill(pair.geometry), []

    class Recording:
        card = H200

        def compile_ahead(self, found: Any) -> None:
            calls.extend(found)

        def prepare(self, call: Any) -> Any:
            return call

    make_prefill(pair, program, torch.device("cpu"), Recording())  # type: ignore[arg-type]
    kinds = [op.kind for op in program.ops if op.kind in ROW_KERNELS]
    assert len(set(kinds)) >= 6
    others = [
        call for call in calls if call.kernel.name.startswith(("experts", "add_ranks", "gather_kv", "route_top_k"))
    ]
    assert len(calls) - len(others) == len(kinds)


def test_what_torch_takes_meanwhile_is_in_the_plan(tmp_path: Path) -> None:
    """At least the largest matrix, of contexts of any length; only where kernels run, and in prefill."""
    pair = pair_of("llama", tmp_path, max_context=4096)
    program, find = build_prefill(pair.geometry), pair.source.__getitem__
    short = build_prefill(replace(pair.geometry, max_context=128))
    largest = max(2 * find(op.weights["weight"]).numel() for op in program.ops if op.kind == "linear")
    assert temporary_bytes(program, find) == temporary_bytes(short, find) > largest
    assert temporary_bytes(pair.program(0, 1), find) == 0
    for has_kernels, expected in ((True, temporary_bytes(program, find)), (False, 0)):
        need = memory_need((program,), pair.source, torch.device("cpu"), has_kernels=has_kernels)
        assert need.prefill_bytes == need.parts()["prefill_bytes"] == expected


def test_keys_and_values_of_the_longest_context_are_in_the_plan(tmp_path: Path) -> None:
    """Beside the scratch, where kernels gather them."""
    pair = pair_of("llama", tmp_path, max_context=4090)
    program, find, config = build_prefill(pair.geometry), pair.source.__getitem__, pair.target.config
    room = room_of(program, lambda name: find(name).shape)
    found = room.attention
    row_bytes = config.num_kv_heads * config.head_dim * pair.geometry.dtype.itemsize
    assert found.keys_bytes == (4090 - 1 + pair.geometry.prefill_chunk) * row_bytes
    plain, kernels = (
        memory_need((program,), pair.source, torch.device("cpu"), has_kernels=each) for each in (False, True)
    )
    assert kernels.scratch_bytes - plain.scratch_bytes == room.num_bytes
    assert room.num_bytes == found.num_bytes + room.products.num_bytes
