"""Scratch of prefill overlaps where it may: never what is held together, and no launch reaches that far."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench
from served_model import alone, load_bundled, load_small

from lowlat import Runtime
from lowlat.executors.distributed.parallel import exchanged_rows
from lowlat.executors.distributed.peers import PeerMemory
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.planned import META, buffers_without_memory, planned_workspaces, weights_without_memory
from lowlat.executors.reference.executor import ReferenceExecutor
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Role, aligned_bytes
from lowlat.graphs.program import Program
from lowlat.graphs.scratch import APART, place_scratch
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.lowering.binding import Binding
from lowlat.lowering.fusion import cover
from lowlat.lowering.lower import FUSIONS, lower
from lowlat.lowering.memory import memory_of
from lowlat.models.rank_weights import rank_weights
from lowlat.models.shard import rank_configs
from lowlat.models.weight_plan import weight_plan
from lowlat.step.prefill import build_prefill, build_prefills

PUBLISHED = ("llama-8b", "gpt-oss-20b", "qwen3.5-9b", "gemma-4-26b-a4b", "gemma-4-e4b")
GIB = 1 << 30
AMPERE = Gpu(108, 163 * 1024, (8, 0))
Case, Model = bench("lib.case").Case, bench("lib.model").Model


def prefill_of(name: str, chunks: int, config: Any = None) -> Program:
    model = Model(name)
    shapes = replace(model.shapes(Case(4, 4096, 3 if model.geometry.head else 0)), max_prefill_chunks=chunks)
    shapes = shapes if config is None else replace(shapes, config=config)
    return build_prefill(shapes, chunks * shapes.prefill_chunk)


@pytest.mark.parametrize("name", PUBLISHED)
def test_buffers_that_are_held_together_have_places_of_their_own(name: str) -> None:
    program = prefill_of(name, 16)
    places = place_scratch(program)
    specs = {spec.name: spec for spec in program.specs(Role.SCRATCH)}
    assert places.offsets.keys() == specs.keys() and all(offset % 256 == 0 for offset in places.offsets.values())
    ends = {each: places.offsets[each] + aligned_bytes(spec) for each, spec in specs.items()}
    assert max(ends.values()) == places.num_bytes
    overlapping = 0
    for one, other in combinations(specs, 2):
        if places.offsets[one] < ends[other] and places.offsets[other] < ends[one]:
            overlapping += 1
            first, second = sorted((program.uses[each][0][0], program.uses[each][-1][0]) for each in (one, other))
            assert second[0] - first[1] > APART, (one, other)
    assert overlapping


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_launch_covers_as_many_operations_as_places_are_apart(name: str) -> None:
    model = Model(name)
    shapes = replace(model.shapes(Case(4, 4096, 3 if model.geometry.head else 0)), max_prefill_chunks=4)
    for program in build_prefills(shapes).values():
        assert max(run.count for _, run in cover(program, H200, FUSIONS)) < APART


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    ("gpu", "ranks"), [(H200, 1), (AMPERE, 1), (H200, 2)], ids=lambda each: getattr(each, "capability", each)
)
@pytest.mark.parametrize("fuse", [True, False])
def test_launches_are_given_bytes_only_while_their_buffer_is_held(name: str, gpu: Gpu, ranks: int, fuse: bool) -> None:
    """Of two buffers in one place the last call that is given the one comes before the first that is given the other:
    what a launch fills ahead, or keeps to itself, is its arguments, too."""
    model = Model(name)
    config = rank_configs(model.config, ranks)[0]
    program = prefill_of(name, 4, config)
    plan = dict(weight_plan(model.config))
    if model.geometry.head:
        plan |= model.speculator.weight_plan(model.config.dtype)
    whole = {key: torch.empty(shape, dtype=dtype, device=META) for key, (shape, dtype) in plan.items()}
    shapes = rank_weights(whole, config)
    place = RankPlace(0, PeerMemory([META] * ranks, exchanged_rows([program]))) if ranks > 1 else None
    buffers = buffers_without_memory(program)
    held = {memory_of(buffers[spec.name]): spec for spec in program.specs(Role.SCRATCH)}
    packed = weights_without_memory(shapes, [program], gpu, fuse=fuse)
    binding = Binding(program, buffers, packed, gpu, SharedWorkspace(META), all_reduces=place, is_invariant=False)
    groups = lower(binding, fuse=fuse)
    given: dict[str, tuple[int, int]] = {}
    for number, call in enumerate(call for group in groups for call in group.calls):
        for tensor in call.tensors:
            spec = held.get(memory_of(tensor))
            if spec is not None:
                given[spec.name] = given.get(spec.name, (number, number))[0], number
    offsets = place_scratch(program).offsets
    ends = {spec.name: offsets[spec.name] + aligned_bytes(spec) for spec in held.values()}
    together = [
        sorted((given[one], given[other]))
        for one, other in combinations(given, 2)
        if offsets[one] < ends[other] and offsets[other] < ends[one]
    ]
    assert together and all(first[1] < second[0] for first, second in together)
    planned = planned_workspaces((program,), shapes, gpu, rank=(0, ranks), fuse=fuse)  # of few layers
    unused = planned.unused_by(program)
    assert bool(unused) == fuse and unused <= {spec.name for spec in held.values()} - given.keys()


def test_what_is_left_of_streams_between_layers() -> None:
    """Of Llama-3.1-8B's 33 streams of 16 MiB and of gpt-oss-20b's 25 of 11 few are held at a time."""
    for name, most in (("llama-8b", 0.6), ("gpt-oss-20b", 0.3)):
        program = prefill_of(name, 16)
        alone = sum(aligned_bytes(spec) for spec in program.specs(Role.SCRATCH))
        assert place_scratch(program).num_bytes < most * GIB < 0.6 * alone


def load_hybrid() -> Runtime:
    target = Path(__file__).parents[1] / "data" / "hybrid"
    return Runtime.load(target, max_batch=2, max_context=512, device="cpu")


def of_prompts(load: Callable[[], Runtime]) -> list[tuple[int, ...]]:
    with load() as runtime:
        size = runtime.geometry.config.vocab_size
        prompts = [[(7 * k * k + length) % size for k in range(length)] for length in (5, 129, 200)]
        return [alone(runtime, prompt, max_tokens=6, temperature=0.0) for prompt in prompts]


@pytest.mark.parametrize("load", [load_bundled, load_small, load_hybrid])
def test_what_its_memory_held_before_matters_to_no_program(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], Runtime]
) -> None:
    expected, prepare, filled = of_prompts(load), ReferenceExecutor._prepare, set[str]()

    def prepared(executor: ReferenceExecutor, key: Any) -> Any:
        own, operations = prepare(executor, key)
        for name, spec in own.specs.items():
            if spec.role is Role.SCRATCH:
                own[name].reshape(-1).view(torch.uint8).fill_(255)  # no number, of floats
                filled.add(name)
        return own, operations

    monkeypatch.setattr(ReferenceExecutor, "_prepare", prepared)
    assert of_prompts(load) == expected
    assert {"prefill.residual.0", "finite"} <= filled
