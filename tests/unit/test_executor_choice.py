"""Which executor a model gets: kernels where they cover it; torch's operations, or a refusal by name, elsewhere."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_changes import with_changes

import lowlat
from lowlat.engine.loading import loading
from lowlat.errors import ConfigError, ShapeError
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.make import check_positions, settle_executor
from lowlat.graphs import Bucket, BufferSpec, Role
from lowlat.graphs.program import Program, ProgramBuilder, Stage
from lowlat.kernels.attention.attention import attention
from lowlat.kernels.attention.limits import choose_split
from lowlat.kernels.elementwise.norm import check_width
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.sampling.select import count_chunks
from lowlat.lowering.covers import uncovered
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import DenseSpec, ExpertsSpec
from lowlat.models.target import load_target
from lowlat.options.runtime import RuntimeConfig
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.eagle3.weights import load_draft_model
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill
from lowlat.step.state import StepGeometry
from lowlat.tools.tune.pairs import Pair, weight_shapes

DEMO = Path(lowlat.__file__).parent / "demo"
EXPERTS = ExpertsSpec(
    inner_size=64, num_experts=4, num_experts_per_token=2, swiglu_limit=7.0, swiglu_alpha=1.7, weight_format="mxfp4"
)
GPU = DeviceChoice(torch.device("cuda", 0), "graph", "a usable NVIDIA GPU is present")


@pytest.fixture(scope="module")
def known() -> tuple[ModelConfig, Eagle3Config]:
    """The bundled pair's geometry, which the kernels cover."""
    target = load_target(DEMO / "target", dtype="bfloat16")
    return target.config, load_draft_model(DEMO / "head", target.config).config


def changed(
    known: tuple[ModelConfig, Eagle3Config], target: dict[str, Any], head: dict[str, Any] | None
) -> tuple[ModelConfig, Eagle3Config | None]:
    return with_changes(known[0], **target), None if head is None else with_changes(known[1], **head)


def planned(
    config: ModelConfig, head: Eagle3Config | None, **sizes: int
) -> tuple[list[Program], dict[str, torch.Tensor]]:
    """A step's program and a prompt's, and the shapes of the weights."""
    own = geometry(config, head, 512, max_rows=2, num_drafted_rows=2, **sizes)
    topology = TreeTopology.chain(int(head is not None))
    step = build_step(own, Bucket(1, topology.num_nodes, topology.depth), topology)
    weights = weight_shapes(Pair("known", config, own.speculator))
    for number, layer in enumerate(config.layers):
        if isinstance(layer.ffn, ExpertsSpec):
            router = torch.empty(layer.ffn.num_matrices, config.hidden_size, device="meta")
            weights[f"layers.{number}.router.weight"] = router
    return [step, build_prefill(own)], weights


@pytest.mark.parametrize(
    ("target", "head", "problem"),
    [
        ({"dtype": "float32"}, {}, "the kernels compute in bfloat16 and dtype is float32"),
        (
            {"ffn": replace(EXPERTS, num_experts=513)},
            None,
            "router take num_experts at most 512, and the target's is 513",
        ),
        (
            {"ffn": replace(EXPERTS, num_experts=32, num_experts_per_token=11)},
            {},
            "take num_experts_per_tok at most 10, and the target's is 11",
        ),
        (
            {"ffn": replace(EXPERTS, shared_ffn=DenseSpec(inner_size=44))},
            None,
            "silu_mul take intermediate_size a multiple of 8, and the target's is 44",
        ),
        (
            {"ffn": EXPERTS, "hidden_size": 6176},
            None,
            "router take hidden_size a multiple of 8, at most 6144, and the target's is 6176",
        ),
        (
            {"ffn": EXPERTS, "inner_size": 72},
            {},
            "moe_intermediate_size a multiple of 32 for MXFP4, and the target's is 72",
        ),
        ({"head_dim": 8}, None, "the target's is 8"),
        ({"head_dim": 8}, {}, "attention take head_dim 64, 128, 256 or 512, and the target's is 8"),
        ({}, {"head_dim": 96}, "the draft model's is 96"),
        ({"hidden_size": 60}, None, "(hidden_size) a multiple of 8, at most 65536, and the target's is 60"),
        ({"hidden_size": 65544}, None, "and the target's is 65544"),
        ({}, {"inner_size": 100}, "intermediate_size a multiple of 8, and the draft model's is 100"),
        ({"vocab_size": 327681}, None, "take vocab_size at most 327680, and the target's is 327681"),
    ],
)
def test_what_the_kernels_do_not_run_is_named_with_the_way_out(
    target: dict[str, Any], head: dict[str, Any] | None, problem: str, known: tuple[ModelConfig, Eagle3Config]
) -> None:
    programs = planned(*changed(known, target, head))
    assert problem in (uncovered(*programs) or "")
    for asked in ("graph", "eager"):
        with pytest.raises(ConfigError, match=f"'{asked}' cannot run.*{re.escape(problem)}.*use 'reference' or 'auto'"):
            settle_executor(replace(GPU, executor=asked), asked, *programs)
    settled = settle_executor(GPU, "auto", *programs)
    assert (settled.executor, settled.loud, settled.device) == ("reference", True, GPU.device)
    assert problem in settled.reason
    reference = replace(GPU, executor="reference")
    assert settle_executor(reference, "reference", *programs) is reference


@pytest.mark.parametrize("head", [None, {}, {"head_dim": 128}])
def test_what_the_kernels_run_stays_with_them(
    head: dict[str, Any] | None, known: tuple[ModelConfig, Eagle3Config]
) -> None:
    programs = planned(*changed(known, {}, head))
    assert uncovered(*programs) is None
    assert settle_executor(GPU, "auto", *programs) is GPU


@pytest.mark.parametrize(("group", "problem"), [(16, None), (4, "take conv_group_size a multiple of 8, and the draft")])
def test_a_parameter_beyond_the_kernels_is_named(group: int, problem: str | None) -> None:
    shapes = {"x": (4, 16), "coefficients": (4, 4 * 16 // group), "row_live": (2, 2), "out": (4, 16)}
    dtypes = {"coefficients": torch.float32, "row_live": torch.uint8}
    builder = ProgramBuilder("step", OPERATIONS)
    for name, shape in shapes.items():
        builder.declare(BufferSpec(name, shape, dtypes.get(name, torch.bfloat16), Role.STATE))
    reads = {name: name for name in ("x", "coefficients", "row_live")}
    builder.emit(
        "local_conv", Stage.DRAFT, reads=reads, writes={"out": "out"}, weights={"weight": "conv"}, side=0, group=group
    )
    found = uncovered([builder.build()])
    assert found is None if problem is None else problem in (found or "")


def test_the_limits_are_those_of_the_kernels(known: tuple[ModelConfig, Eagle3Config]) -> None:
    assert count_chunks("logits", 327680)
    with pytest.raises(ShapeError, match="327680"):
        count_chunks("logits", 327681)
    check_width(65536)
    for width in (65544, 60):
        with pytest.raises(ShapeError, match=r"multiple of 8, at most 65536"):
            check_width(width)
    with pytest.raises(ShapeError, match="multiple of 8"):
        gate_up_permutation(100)


@pytest.mark.parametrize("size", [8, 24, 512])
def test_kv_blocks_that_the_kernels_do_not_take_are_named(size: int, known: tuple[ModelConfig, Eagle3Config]) -> None:
    programs = planned(*known, block_size=size)
    with pytest.raises(ConfigError, match=f"take block_size 16, 32, 64, 128 or 256, and the target's is {size};"):
        settle_executor(replace(GPU, executor="graph"), "graph", *programs)
    settled = settle_executor(GPU, "auto", *programs)
    assert (settled.executor, settled.loud) == ("reference", True)


def geometry(config: ModelConfig, head: Eagle3Config | None, max_context: int, **changes: Any) -> StepGeometry:
    window = changes.pop("draft_window", None)
    speculator = None if head is None else Eagle3Speculator(head, window)
    return StepGeometry(
        config, speculator, max_context=max_context, num_paths=1, path_width=8, num_blocks=9, prefill_chunk=512,
        **{"max_batch": 1, "max_rows": 8, "block_size": 32, **changes},
    )  # fmt: skip


def attend(sizes: StepGeometry, kv_heads: int) -> None:
    """The kernel's own check of what a slot may have, without memory."""
    with torch.device("meta"):
        attention(
            q=torch.zeros(8, kv_heads, 64, dtype=torch.bfloat16),
            k_cache=torch.zeros(9, kv_heads, sizes.block_size, 64, dtype=torch.bfloat16),
            v_cache=torch.zeros(9, kv_heads, sizes.block_size, 64, dtype=torch.bfloat16),
            block_table=torch.zeros(1, sizes.table_width, dtype=torch.int32),
            slots=torch.zeros(1, dtype=torch.int32),
            dense_lens=torch.zeros(1, dtype=torch.int32),
            row_live=torch.ones(8, dtype=torch.uint8),
            row_masks=torch.ones(1, 8, dtype=torch.int64),
            out=torch.zeros(8, kv_heads * 64, dtype=torch.bfloat16),
            scale=1.0,
            workspace=lambda name, shape, dtype: torch.zeros(shape, dtype=dtype),
            split=choose_split(sizes.max_batch, sizes.max_context, kv_heads),
        )


@pytest.mark.parametrize(("kv_heads", "most"), [(1, 524248), (4, 524248)])
def test_a_context_that_attention_does_not_reach_is_refused(
    kv_heads: int, most: int, known: tuple[ModelConfig, Eagle3Config]
) -> None:
    """Where the kernels refuse it, to the position; a window in every layer reaches anywhere."""
    config, head = with_changes(known[0], num_kv_heads=kv_heads), with_changes(known[1], num_kv_heads=kv_heads)
    for other in (None, head):
        check_positions(geometry(config, other, most))
        with pytest.raises(ConfigError, match=rf"max_context {most + 1} is above {most}, .*lower max_context"):
            check_positions(geometry(config, other, most + 1))
    attend(geometry(config, None, most), kv_heads)
    with pytest.raises(ShapeError, match="exceeds"):
        attend(geometry(config, None, most + 1), kv_heads)
    windows = with_changes(config, windows=(128,) * config.num_layers)
    check_positions(geometry(windows, None, 1 << 20))
    check_positions(geometry(windows, head, 1 << 20, draft_window=256))
    check_positions(geometry(windows, with_changes(head, windows=(512,)), 1 << 20))
    with pytest.raises(ConfigError, match="max_context"):
        check_positions(geometry(windows, head, 1 << 20))


def test_such_a_context_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (DEMO / "target").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    config = json.loads((DEMO / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    monkeypatch.setattr(loading, "choose_device", lambda device, executor: GPU)
    read: list[int] = []
    with pytest.raises(ConfigError, match="max_context 600000 is above"):
        loading.load(tmp_path, None, RuntimeConfig(max_context=600_000), lambda done, total: read.append(done))
    assert not read
