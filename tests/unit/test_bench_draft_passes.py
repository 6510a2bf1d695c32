"""Random draft models of every method, and the benchmark of their passes, tried on a tiny one without a card."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benches import bench
from cli_calls import answer, refusal

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.kernels.toolchain.kernel import H200
from lowlat.models.geometry import ModelConfig
from lowlat.options.config import SpeculativeConfig
from lowlat.options.request import SamplingParams
from lowlat.speculators.methods import draft_method, load_speculator
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.tools.bench.geometry import random_target, read_geometries
from lowlat.tools.bench.results import read_struct
from lowlat.tools.bench.step_bytes import part_sizes, weight_sizes
from lowlat.tools.bench.subject import open_random
from lowlat.tools.draft_model.random_models import (
    DRAFT_MODELS,
    draft_config,
    random_speculator,
    random_weights,
    write_draft_model,
)
from lowlat.tools.tune.pairs import LoweredPrograms, Pair

passes, result, steps = bench("draft_passes"), bench("draft_passes_result"), bench("draft_passes_step")
dense = bench("dense_cases")
TINY = read_geometries()["tiny"]


@pytest.mark.parametrize("method", DRAFT_MODELS)
def test_files_say_what_the_geometry_does(method: str, tmp_path: Path) -> None:
    config = random_target(TINY, tmp_path / "target").config
    directory = write_draft_model(TINY, config, tmp_path / method, method=method)
    options = SpeculativeConfig(method=method, model=directory, num_speculative_tokens=5)
    found, made = load_speculator(options, config), random_speculator(TINY, config, method)
    assert draft_method(directory) == method and found.speculator == made and found.notes == ()
    weights = random_weights(made, "bfloat16")
    assert {name: (each.shape, each.dtype) for name, each in weights.items()} == {
        name: (each.shape, each.dtype) for name, each in found.weights.items()
    }


def test_a_geometry_without_a_method_s_draft_model_says_so(tmp_path: Path) -> None:
    small = read_geometries()["smollm2-135m"]
    config = random_target(small, tmp_path).config
    with pytest.raises(ConfigError, match="no draft model of method 'dflash'; it has eagle3"):
        write_draft_model(small, config, tmp_path, method="dflash")
    with pytest.raises(
        ConfigError, match="dspark needs a block_size and the target's 160 tokens; found block_size None"
    ):
        draft_config(TINY.head, random_target(TINY, tmp_path).config, "dspark")


@pytest.mark.second
@pytest.mark.parametrize("method", ["peagle", "dspark"])
def test_a_subject_drafts_by_any_method(method: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"method": method, "simulated_accept_length": 2.0}
    subject = open_random("tiny", TINY, given, {"device": "cpu"}, scratch=tmp_path, drafts=True)
    with subject.load(3, max_batch=1, max_context=64) as runtime:
        assert isinstance(runtime, Runtime)
        runtime.submit([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        while runtime.busy:
            runtime.step()
        figures = runtime.summary()["eagle_speculation"]
        assert figures["num_drafts"] > 0 and figures["mean_acceptance_length"] > 1


def llama_program(method: str, depth: int, directory: Path) -> tuple[ModelConfig, Any, Program]:
    """Llama-3.1-8B's shape, a draft model for it, and their step behind 8192 tokens."""
    geometry = read_geometries()["llama-8b"]
    config: ModelConfig = random_target(geometry, directory).config
    speculator = random_speculator(geometry, config, method)
    shapes = passes.step_shapes(
        config, speculator, SimpleNamespace(depth=[depth], batch=1, context=8192, accept_length=3.0)
    )
    return config, speculator, build_step(shapes, Bucket(1, depth + 1, depth), TreeTopology.chain(depth))


def llama_pass(method: str, depth: int, directory: Path) -> Any:
    """The bytes of a pass."""
    config, speculator, program = llama_program(method, depth, directory)
    sizes = weight_sizes(config) | part_sizes(speculator.weight_plan(config.dtype), config)
    return steps.pass_bytes(program, sizes, [8192.0])


def test_a_chain_reads_its_weights_for_every_draft_and_a_block_once(tmp_path: Path) -> None:
    """Of Llama-3.1-8B's shape; the chain's are what the dense benchmark counts."""
    chain = [dense.step_bytes(dense.LLAMA_8B, dense.Case(1, 8192, depth)) for depth in (0, 3)]
    found = llama_pass("eagle3", 3, tmp_path)
    assert found.total == pytest.approx(chain[1] - chain[0], rel=1e-3) and found.read == pytest.approx(
        found.total, rel=1e-3
    )
    layer = 2 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    kv, whole = 2 * 8192 * 1024 * 2, 2 * 128256 * 4096
    for depth in (3, 7):
        block = llama_pass("peagle", depth, tmp_path)
        assert block.layers == pytest.approx(4 * layer + 2 * (3 + 1.5) * 4096 * 4096, rel=1e-3)
        assert block.lm_head == 2 * 32000 * 4096 and block.kv == pytest.approx(4 * kv, rel=1e-3)
        block = llama_pass("dflash", depth, tmp_path)
        assert block.layers == pytest.approx(5 * layer + 2 * 5 * 4096 * 4096, rel=1e-3)
        assert (block.lm_head, block.markov) == (whole, 0) and block.kv == pytest.approx(5 * kv, rel=1e-3)
        context = 5 * 2 * 2048 * 4096  # projections that accepted rows and the block read apart
        assert block.read == pytest.approx(block.total + context, rel=1e-3)
        biased = llama_pass("dspark", depth, tmp_path)
        assert (biased.layers, biased.lm_head) == (block.layers, whole)
        assert biased.markov == depth * 2 * 128256 * 256


@pytest.mark.parametrize(
    ("method", "launches"),
    [("eagle3", (31, 49, 67)), ("peagle", (32, 37, 37)), ("dflash", (42, 42, 42)), ("dspark", (48, 52, 56))],
)
def test_a_pass_has_few_launches(method: str, launches: tuple[int, ...], tmp_path: Path) -> None:
    """At 3, 5 and 7 drafts. A block's layer has seven: two of attention, and behind more than eight rows two norms."""
    for depth, count in zip((3, 5, 7), launches, strict=True):
        config, speculator, program = llama_program(method, depth, tmp_path)
        lowered = LoweredPrograms(Pair("llama-8b", config, speculator), H200, [program]).groups(program, H200)
        assert sum(len(group.calls) for group in lowered if group.stage in steps.PASS) == count


def test_plans_of_a_shape_s_draft_model_are_listed_by_method() -> None:
    found = answer(
        "tune", "gemm", "--geometry", "llama-8b", "--method", "dspark", "--batch", 1, "-S", 7, "--list", "--json"
    )
    keys = {shape["key"] for shape in found["shapes"]}
    assert any("N=128256 K=256" in key for key in keys) and any("N=10240 K=4096" in key for key in keys)
    assert "--method is of a published shape" in refusal("tune", "--method", "dflash", "--list")
    assert "no draft model of method 'dflash'" in refusal(
        "tune", "--geometry", "qwen3-8b", "--method", "dflash", "--list"
    )


@pytest.mark.second
def test_every_method_has_a_row_beside_its_floor(tmp_path: Path) -> None:
    out = tmp_path / "new" / "passes.json"
    given = [
        "--geometry",
        "tiny",
        "--context",
        "24",
        "--depth",
        "3",
        "--replays",
        "2",
        "--turn",
        "1",
        "--device",
        "cpu",
    ]
    assert passes.main([*given, "--commit", "c0ffee1", "--out", str(out)]) == 0
    file = read_struct(out, result.DraftPassesFile)
    assert [row.method for row in file.rows] == list(DRAFT_MODELS) and file.stamps.commit == "c0ffee1"
    assert file.setup.simulated[-1] == "acceptance: 3 tokens a step imposed" and file.setup.wall_gb_per_s is None
    for row in file.rows:
        assert row.step.p50 > row.pass_ms > 0 and row.alone.count == 2 and row.recorded_ms is None
        assert row.floor_ms == pytest.approx(row.bytes.total / 4.6e9, abs=1e-4) and row.over_floor > 1
    with pytest.raises(SystemExit):
        passes.main([*given, "--turn", "400", "--out", str(out)])
