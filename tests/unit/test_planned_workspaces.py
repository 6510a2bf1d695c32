"""The plan's count of kernels' workspaces, next to what lowered programs ask for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowered import CPU, Pair, pretend_gpu
from prefill_cases import make_named
from stages import wide
from tiny_models import make_pair, make_target

from lowlat.engine.loading import loading
from lowlat.engine.loading.geometry import make_geometry
from lowlat.engine.loading.programs import build_rank, make_ladder
from lowlat.engine.loading.speculation import make_topologies
from lowlat.engine.memory import plan
from lowlat.engine.memory.plan import check_fits, plan_rank
from lowlat.errors import ConfigError
from lowlat.executors import kernel_executor, launcher
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.distributed.parallel import exchanged_rows
from lowlat.executors.distributed.peers import PeerMemory
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.eager import EagerExecutor
from lowlat.executors.kernel_executor import KernelOptions
from lowlat.executors.make import planned_gpus
from lowlat.executors.planned import planned_workspaces
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.graphs.scratch import place_scratch
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.lowering import memory
from lowlat.lowering.binding import Binding
from lowlat.lowering.lower import LoweredGroup, lower
from lowlat.lowering.memory import few_layers, workspace_bytes
from lowlat.models.rank_weights import rank_weights
from lowlat.models.shard import rank_configs
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefills
from lowlat.step.variants import first_token_bucket
from lowlat.tools.tune import pairs
from lowlat.tools.tune.pairs import LoweredPrograms, random_pair, weight_shapes

AMPERE = Gpu(108, 163 * 1024, (8, 0))
RANK_BUCKETS = (Bucket(2, 1, 0), Bucket(8, 1, 0), first_token_bucket(0))
# inner widths of 13 steps, of which two ranks have 7 and 6
CUT_SIZES: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256, "intermediate_size": 832,
    "vocab_size": 512,
}  # fmt: skip
GEOMETRIES = (
    "llama-8b", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3.5-9b", "qwen3.6-35b-a3b", "gemma-3-27b", "gemma-4-26b-a4b",
    "gemma-4-e4b",
)  # fmt: skip


def programs_of(pair: pairs.Pair, **options: Any) -> list[Program]:
    """Every program of a runtime of a pair."""
    speculative, slots = None, options["max_batch"]
    topologies: dict[int, Any] = {0: TreeTopology.chain(0)}
    if pair.speculator is not None:
        drafts = SpeculativeConfig(model="a draft model", num_speculative_tokens=3)
        speculative = fit_slots(drafts, slots) or drafts
        topologies = make_topologies(speculative, slots)
    config = RuntimeConfig(dtype=pair.config.dtype, **options)
    geometry = make_geometry(pair.config, pair.speculator, topologies, config, speculative)
    rank = build_rank(geometry, make_ladder(geometry, topologies, speculative), topologies)
    return [*rank.programs.values(), *rank.prefills.values()]


def asked(pair: pairs.Pair, gpu: Gpu, programs: Sequence[Program]) -> dict[tuple[str, torch.dtype], int]:
    """The most elements of each workspace that programs of all layers ask for."""
    most: dict[tuple[str, torch.dtype], int] = {}

    def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device="meta")
        most[name, dtype] = max(made.numel(), most.get((name, dtype), 0))
        return made

    lowered = LoweredPrograms(pair, gpu, programs)
    lowered.workspace = workspace  # type: ignore[assignment]
    for program in programs:
        lowered.groups(program, gpu)
    return {key: count for key, count in most.items() if count}


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("llama-8b", H200), ("gpt-oss-20b", AMPERE), *(wide(name, H200) for name in GEOMETRIES if name != "llama-8b")],
    ids=lambda each: each if isinstance(each, str) else str(each.capability),
)
def test_few_layers_ask_for_the_workspaces_of_all(name: str, gpu: Gpu, tmp_path: Path) -> None:
    """Each by name and to the byte: of steps of every bucket, of first tokens and of every size of prefill."""
    pair = random_pair(name, tmp_path)
    programs = programs_of(pair, max_batch=16, max_context=32768, prompt_logprobs=True)
    weights = weight_shapes(pair)
    assert planned_workspaces(programs, weights, gpu).sizes == asked(pair, gpu, programs)
    kept = [len(few_layers(program, lambda _: None).ops) for program in programs]
    assert sum(kept) < 0.6 * sum(len(program.ops) for program in programs)


def test_torch_s_operations_take_memory_where_no_kernel_covers_a_prompt(tmp_path: Path) -> None:
    """Of the largest GEMM, that of gates and ups, and of attention; none where prompts have kernels."""
    pair = random_pair("llama-8b", tmp_path)
    programs, weights = programs_of(pair, max_batch=1, max_context=4096), weight_shapes(pair)
    rows = max(
        program.buffers["prefill_tokens"].shape[0] for program in programs if "prefill_tokens" in program.buffers
    )
    gemm = 2 * 28672 * 4096 + 4 * rows * 28672
    attention = 2 * rows * 4096 + 16 * 32 * rows
    assert planned_workspaces(programs, weights, AMPERE).temporary == gemm + attention + (64 << 20)
    assert planned_workspaces(programs, weights, H200).temporary == 0


def test_attention_s_partials_of_many_slots_are_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-8B with 32 slots of 128K: a GPU with less space than they take is refused before anything is loaded."""
    pair = random_pair("llama-8b", tmp_path)
    programs = programs_of(pair, max_batch=32, max_context=131072)
    shapes, splits = weight_shapes(pair), 131072 // 512 + 1  # and the rows' own
    need, workspaces = plan_rank(programs, shapes, torch.device("cuda"), H200)
    assert workspaces is not None
    planned = workspaces.sizes
    assert planned["attention.partials", torch.float32] == 32 * 8 * splits * 16 * 128
    arena = max(place_scratch(program, workspaces.unused_by(program)).num_bytes for program in programs)
    assert need.scratch_bytes == arena + workspace_bytes(planned)
    free = need.total_bytes - workspace_bytes(planned) // 2
    monkeypatch.setattr(plan, "available_bytes", lambda place: free if place.type == "cuda" else None)
    with pytest.raises(
        ConfigError,
        match=r"scratch \d+\.\d\d.* max_context, max_prefill_chunks, kv_cache_gib or kv_blocks",
    ):
        check_fits(need, torch.device("cuda"))


class Lowerings:
    """How often programs were lowered onto no memory, to find workspaces, and onto an executor's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.few, self.whole = list[str](), list[str]()
        monkeypatch.setattr(memory, "lower", partial(self._lower, self.few))
        monkeypatch.setattr(kernel_executor, "lower", partial(self._lower, self.whole))

    def _lower(self, noted: list[str], binding: Binding, **options: Any) -> tuple[LoweredGroup, ...]:
        noted.append(binding.program.name)
        return lower(binding, **options)


def steps_of(pair: Pair) -> dict[Bucket, Program]:
    """Programs of steps of several sizes, not the largest first."""
    buckets = {Bucket(8, 1, 0): 0, Bucket(1, 1, 0): 0, Bucket(2, 1, 0): 0, first_token_bucket(0): 0}
    if 3 in pair.topologies:
        buckets = {Bucket(1, 4, 3): 3, **buckets}
    return {
        bucket: pair.program(depth, 0 if bucket == first_token_bucket(0) else bucket.batch)
        for bucket, depth in buckets.items()
    }


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["llama", "mxfp4"])
def test_an_executor_holds_the_workspaces_that_are_planned(
    name: str, fuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more, whichever program asks for the most, and whatever order they are lowered in; whether it is told or finds
    them itself, of all programs or of those that the plan lacks, or of another GPU or kind of lowering."""
    pretend_gpu(monkeypatch, H200)
    pair: Pair = make_named(name, tmp_path)
    steps, prefills = steps_of(pair), build_prefills(pair.geometry)
    every = [*steps.values(), *prefills.values()]
    lowerings = Lowerings(monkeypatch)
    planned = planned_workspaces(every, pair.source, H200, fuse=fuse)
    assert len(lowerings.few) == len(every)
    alike = [replace(each) for each in every[:2]]
    for own, found_here in (
        (None, every),
        (planned, []),
        (planned_workspaces(every[2:], pair.source, H200, fuse=fuse), every[:2]),
        (replace(planned, gpu=replace(H200)), every),
        (replace(planned, rank=(0, 2)), every),
        (replace(planned, fuse=not fuse), every),
        (replace(planned, is_invariant=True), every),
        (replace(planned, programs=(*alike, *every[2:])), every[:2]),
    ):
        lowerings.few.clear()
        executor = EagerExecutor(steps, prefills, pair.source, CPU, KernelOptions(fuse=fuse, gpu=H200, planned=own))
        assert sorted(lowerings.few) == sorted(each.name for each in found_here)
        assert executor.workspace.num_bytes == workspace_bytes(planned.sizes) > 0
        assert len(executor.workspace.tensors()) == len(planned.sizes)
        executor.close()


@pytest.mark.parametrize("invariant", [False, wide(True)], ids=["", "invariant"])
def test_ranks_hold_the_workspaces_that_are_planned(
    invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each its own, on GPUs of their own and on a shared one; another rank's plan is not taken."""
    pretend_gpu(monkeypatch, H200)
    make_target(tmp_path, "llama", num_hidden_layers=4, **CUT_SIZES)
    pair = Pair(tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=64)
    configs = rank_configs(pair.geometry.config, 2, invariant=invariant)
    topology, lowerings = pair.topologies[0], Lowerings(monkeypatch)
    for places in ([CPU, torch.device("cpu", 1)], [CPU, CPU]):
        gpu, executors = replace(H200, is_shared=places[0] == places[1]), list[EagerExecutor]()
        made = [
            (
                {
                    bucket: build_step(replace(pair.geometry, config=config), bucket, topology)
                    for bucket in RANK_BUCKETS
                },
                build_prefills(replace(pair.geometry, config=config)),
            )
            for config in configs
        ]
        peers = PeerMemory(places, exchanged_rows([*made[0][0].values(), *made[0][1].values()]))
        parts = [rank_weights(pair.source, config) for config in configs]
        plans = [
            planned_workspaces([*steps.values(), *prefills.values()], parts[number], gpu, rank=(number, 2))
            for number, (steps, prefills) in enumerate(made)
        ]
        for number, own in ((0, plans[0]), (1, plans[1]), (1, plans[0])):
            lowerings.few.clear()
            place = RankPlace(number, peers, executors[0] if executors else None)
            steps, prefills = made[number]
            options = KernelOptions(place=place, gpu=gpu, planned=own)
            executor = EagerExecutor(steps, prefills, parts[number], CPU, options)
            assert len(lowerings.few) == (0 if own is plans[number] else len(steps) + len(prefills))
            assert executor.workspace.num_bytes == workspace_bytes(plans[number].sizes) > 0
            executors.append(executor)
        for executor in reversed(executors):
            executor.close()


@pytest.mark.second
def test_a_load_finds_workspaces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the memory plan, of all programs of a target and its draft model; then each is lowered whole, once."""
    paths = make_pair(tmp_path, "llama", hidden_size=64, intermediate_size=96, head_dim=64)
    pretend_gpu(monkeypatch, H200)
    monkeypatch.setattr(loading, "choose_device", lambda *_: DeviceChoice(CPU, "eager", "a test"))
    monkeypatch.setattr(loading, "rank_devices", lambda choice, size, named: [CPU] * size)
    lowerings = Lowerings(monkeypatch)
    options = RuntimeConfig(max_batch=2, max_context=96, dtype="bfloat16")
    loaded = loading.load(paths.target, SpeculativeConfig(model=paths.head, num_speculative_tokens=2), options)
    assert len(lowerings.few) == len(lowerings.whole) > 6
    assert sorted(lowerings.few) == sorted(lowerings.whole)
    executor: Any = loaded.executor
    (held,), arena = loaded.memory, executor._arena.numel()
    assert held.need.scratch_bytes == arena + executor.workspace.num_bytes
    loaded.close()


def test_a_load_reads_the_tuning_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher takes the properties that it is given, and reads those of its device else."""
    read = list[torch.device]()

    def gpu_of(device: torch.device, *, is_shared: bool) -> Gpu:
        read.append(device)
        return replace(H200, is_shared=is_shared)

    monkeypatch.setattr(launcher, "gpu_of", gpu_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, answer in (("init", None), ("current_stream", None), ("get_device_capability", H200.capability)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, _answer=answer: _answer)
    monkeypatch.setattr("cuda.core.Device", lambda _: SimpleNamespace(set_current=lambda: None))
    devices = [torch.device("cuda", number) for number in (0, 1, 2)]
    choice = DeviceChoice(devices[0], "graph", "a test")
    first, second, third = planned_gpus(choice, devices)
    assert read == devices[:2] and third is H200
    assert launcher.Launcher(devices[0], gpu=first).gpu is first and read == devices[:2]
    assert launcher.Launcher(devices[1], is_shared=True).gpu.is_shared and read == [*devices[:2], devices[1]]
    assert not second.is_shared and all(each.is_shared for each in planned_gpus(choice, [devices[1]] * 2))
    assert planned_gpus(DeviceChoice(CPU, "reference", "a test"), devices) == []
