"""The plan's count of kernels' workspaces, next to what lowered programs ask for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import CPU, Pair, pretend_gpu
from prefill_cases import make_named
from stages import wide

from lowlat.engine.loading.geometry import make_geometry
from lowlat.engine.loading.programs import build_rank, make_ladder
from lowlat.engine.loading.speculation import make_topologies
from lowlat.engine.memory import plan
from lowlat.engine.memory.plan import check_fits, memory_need
from lowlat.errors import ConfigError
from lowlat.executors.eager import EagerExecutor
from lowlat.executors.planned import planned_workspaces
from lowlat.graphs import Bucket, Role
from lowlat.graphs.program import Program
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.lowering.memory import few_layers, workspace_bytes
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.prefill import build_prefills
from lowlat.step.variants import first_token_bucket
from lowlat.tools.tune import pairs
from lowlat.tools.tune.pairs import LoweredPrograms, random_pair, weight_shapes

AMPERE = Gpu(108, 163 * 1024, (8, 0))
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
    assert planned_workspaces(programs, weights, gpu) == asked(pair, gpu, programs)
    kept = [len(few_layers(program, lambda _: None).ops) for program in programs]
    assert sum(kept) < 0.6 * sum(len(program.ops) for program in programs)


def test_attention_s_partials_of_many_slots_are_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-8B with 32 slots of 128K: a GPU with less space than they take is refused before anything is loaded."""
    pair = random_pair("llama-8b", tmp_path)
    programs = programs_of(pair, max_batch=32, max_context=131072)
    shapes, splits = weight_shapes(pair), 131072 // 512 + 1  # and the rows' own
    planned = planned_workspaces(programs, shapes, H200)
    assert planned["attention.partials", torch.float32] == 32 * 8 * splits * 16 * 128
    need = memory_need(programs, shapes, torch.device("cuda"), has_kernels=True)
    arena = max(sum(spec.num_bytes for spec in program.specs(Role.SCRATCH)) for program in programs)
    assert need.scratch_bytes == arena + workspace_bytes(planned)
    free = need.total_bytes - workspace_bytes(planned) // 2
    monkeypatch.setattr(plan, "available_bytes", lambda place: free if place.type == "cuda" else None)
    with pytest.raises(ConfigError, match=r"scratch \d+\.\d\d.* lower max_batch, max_context or kv_blocks"):
        check_fits(need, torch.device("cuda"))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["llama", "mxfp4"])
def test_an_executor_holds_the_workspaces_that_are_planned(
    name: str, fuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more, whichever program asks for the most, and whatever order they are lowered in."""
    pretend_gpu(monkeypatch, H200)
    pair: Pair = make_named(name, tmp_path)
    buckets = {Bucket(8, 1, 0): 0, Bucket(1, 1, 0): 0, Bucket(2, 1, 0): 0, first_token_bucket(0): 0}
    if 3 in pair.topologies:
        buckets = {Bucket(1, 4, 3): 3, **buckets}
    steps = {
        bucket: pair.program(depth, 0 if bucket == first_token_bucket(0) else bucket.batch)
        for bucket, depth in buckets.items()
    }
    prefills = build_prefills(pair.geometry)
    executor = EagerExecutor(steps, prefills, pair.source, CPU, fuse=fuse)
    planned = planned_workspaces([*steps.values(), *prefills.values()], pair.source, H200, fuse=fuse)
    assert executor.workspace.num_bytes == workspace_bytes(planned) > 0
    executor.close()
