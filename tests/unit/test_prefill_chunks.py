"""Prefill programs without a GPU: the arguments of a chunk, lowered groups, and the memory that they take."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_inventory import GPUS
from lowered import Pair
from lowering_cases import span, write_pair
from prefill_cases import NAMES, make_named
from tiny_models import mxfp4_target

from lowlat.engine.memory.plan import plan_rank
from lowlat.executors.allocation import STATE_ROLES
from lowlat.executors.planned import planned_workspaces
from lowlat.executors.prefill_arguments import ChunkArguments
from lowlat.graphs import BufferSet
from lowlat.kernels.toolchain.kernel import H200
from lowlat.lowering.binding import LibraryCall
from lowlat.lowering.memory import temporary_bytes, workspace_bytes
from lowlat.step.prefill import build_prefill


def pair_of(name: str, directory: Path, **shape: Any) -> Pair:
    pair = make_named(name, directory)
    pair.geometry = replace(pair.geometry, **shape)
    return pair


def test_arguments_of_a_chunk_lie_in_one_block(tmp_path: Path) -> None:
    """The host's arrays are views of one buffer that is copied to the device; a buffer set takes them as its own."""
    program = build_prefill(pair_of("llama", tmp_path).geometry)
    arguments = ChunkArguments([program], torch.device("cpu"))
    parts = ("tokens", "chunk", "live", "draft_live", "table", "positions", "draft_positions", "slot", "count")
    assert set(arguments.host) == {f"prefill_{part}" for part in parts}
    storages = {tensor.untyped_storage().data_ptr() for tensor in arguments.host.values()}
    assert len(storages) == 1
    for name, tensor in arguments.host.items():
        tensor.fill_(1)
        arguments.send()
        assert torch.equal(arguments.device[name], tensor)
    buffers = BufferSet(program.specs(*STATE_ROLES), torch.device("meta"), given=arguments.host)
    assert buffers["prefill_tokens"] is arguments.host["prefill_tokens"]
    assert buffers["lengths"].is_meta


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_is_lowered_over_memory_of_its_own(
    name: str, capability: tuple[int, int], tmp_path: Path
) -> None:
    """By the same table as a step; libraries' calls reach nothing else either."""
    if name == "llama_rows" and capability < (9, 0):
        pytest.skip("coded rows have no other way: their refusal has a test of its own")
    pair = pair_of(name, tmp_path, prefill_chunk=64)
    made = pair.lower_program(build_prefill(pair.geometry), GPUS[capability])
    assert [op for group in made.groups for op in group.ops] == list(made.program.ops)
    owned = sorted(span(tensor) for tensor in made.owned() if tensor.numel())
    for call in (call for group in made.groups for call in group.calls):
        arguments = call.tensors if isinstance(call, LibraryCall) else call.arguments
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.numel():
                start, end = span(argument)
                assert any(low <= start and end <= high for low, high in owned), call
    libraries = {call.name for group in made.groups for call in group.calls if isinstance(call, LibraryCall)}
    assert libraries == (set() if capability == (9, 0) else {"flash_attention", "linear"})


@pytest.mark.parametrize("name", NAMES)
def test_workspaces_are_in_the_plan(name: str, tmp_path: Path) -> None:
    """As many bytes as kernels ask for, of prefill, of a step, and of both, which share them."""
    pair = pair_of(name, tmp_path, prefill_chunk=64, max_context=1000)
    programs = build_prefill(pair.geometry), pair.program(0, 8)
    asked = [pair.lower_program(program, H200).workspace for program in programs]
    planned = [planned_workspaces([program], pair.source, H200).sizes for program in programs]
    assert [each.num_bytes for each in asked] == [workspace_bytes(each) for each in planned]
    both = planned_workspaces(programs, pair.source, H200).sizes
    assert both == {key: max(each.get(key, 0) for each in planned) for key in {*planned[0], *planned[1]}}


def test_layers_of_a_draft_model_before_its_last_attend_in_prefill(tmp_path: Path) -> None:
    """From the first row that there is on; keys and values of all layers are kept."""
    pair = Pair(*write_pair("llama+several_layers", tmp_path))
    made = pair.lower_program(build_prefill(pair.geometry), H200)
    own = [
        op
        for op in made.program.ops
        if op.kind == "prefill_attention" and op.reads["k_cache"].startswith("draft_model.")
    ]
    assert [(op.reads["k_cache"], op.params["first"], op.params["window"]) for op in own] == [
        ("draft_model.k_cache", 1, None),
        ("draft_model.k_cache.1", 1, 96),
    ]
    written = [op.writes["k_cache"] for op in made.program.ops if op.kind == "prefill_kv_write"]
    assert written[-3:] == ["draft_model.k_cache", "draft_model.k_cache.1", "draft_model.k_cache.2"]
    gathered = [call.kernel.name for call in made.calls if call.kernel.name.startswith("gather_kv")]
    assert ["_from1" in name for name in gathered] == [False, False, True, True]


def test_what_torch_takes_meanwhile_is_in_the_plan(tmp_path: Path) -> None:
    """At least the largest matrix, of contexts of any length; only where kernels run, and in prefill."""
    pair = pair_of("llama", tmp_path, max_context=4096)
    program = build_prefill(pair.geometry)

    def find(name: str) -> torch.Size:
        return pair.source[name].shape

    short = build_prefill(replace(pair.geometry, max_context=128))
    largest = max(2 * find(op.weights["weight"]).numel() for op in program.ops if op.kind == "linear")
    assert temporary_bytes(program, find) == temporary_bytes(short, find) > largest
    assert temporary_bytes(pair.program(0, 1), find) == 0
    for gpu, expected in ((H200, temporary_bytes(program, find)), (None, 0)):
        need, _ = plan_rank((program,), pair.source, torch.device("cpu"), gpu)
        assert need.prefill_bytes == need.parts()["prefill_bytes"] == expected


def test_a_layer_with_a_window_gathers_fewer_keys(tmp_path: Path) -> None:
    """The widest layer decides; keys and values of the longest context lie next to the scratch."""
    mxfp4_target(tmp_path, num_hidden_layers=2, sliding_window=20, hidden_size=64, head_dim=64)
    pair = Pair(tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=32, max_context=4000)
    program, config = build_prefill(pair.geometry), pair.target.config
    windowed = tuple(op for op in program.ops if op.kind != "prefill_attention" or op.params.get("window"))
    assert 0 < len(program.ops) - len(windowed) < 2

    def planned(made: Any) -> int:
        return workspace_bytes(planned_workspaces([made], pair.source, H200).sizes)

    row_bytes = config.attention.kv_size * pair.geometry.dtype.itemsize
    fewer = planned(program) - planned(replace(program, ops=windowed))
    assert fewer == 2 * (4096 - 256) * row_bytes  # positions in whole tiles
    plain, kernels = (plan_rank((program,), pair.source, torch.device("cpu"), gpu).need for gpu in (None, H200))
    assert kernels.scratch_bytes - plain.scratch_bytes == planned(program)
