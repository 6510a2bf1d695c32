"""Lowering of Gemma's layers: norms on both sides, scales and inputs by layer are no launches of their own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lowered import Lowered, Pair
from stages import later, wide
from tiny_gemma import E4B, GEMMA_31B, MOE
from tiny_gemma_drafts import gemma_draft_model
from tiny_models import make_target

from lowlat.graphs.program import Stage
from lowlat.kernels.toolchain.kernel import H200
from lowlat.options.runtime import RuntimeConfig
from lowlat.step.prefill import build_prefill
from lowlat.tools.precompile import kernels_of

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 256, "global_head_dim": 512} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": GEMMA_31B | SIZES,
    "moe": MOE | SIZES | {"moe_intermediate_size": 64},
    "per-layer": E4B | SIZES | PER_LAYER,
}
DENSE = ["linear", "qk_norm+rope", "attention", "gemm+cast", "norm+add", "gemm+silu", "gemm+cast", "norm+add"]
# groups of the second layer of each shape, from its first projection on
STEP: dict[str, list[str]] = {
    "dense": DENSE,
    "moe": [
        *(*DENSE[:-1], "norm+norm", "norm+router", "experts_gate_up", "experts_down"),
        "norm+add twice",
    ],
    "per-layer": [*DENSE, "gemm+per_layer_gate", "gemm+cast", "norm+add"],
}
PREFILL: dict[str, list[str]] = {
    "dense": ["norm+add+prefill gemm", "qk_norm+rope", "attention+prefill gemm", "norm+add+gated ffn"],
    "moe": [
        *("norm+add+prefill gemm", "qk_norm+rope", "attention+prefill gemm", "norm+add+gated ffn"),
        *("cast", "rms_norm", "rms_norm", "rms_norm", "router", "experts", "norm+add"),
    ],
    "per-layer": [
        *("norm+add+prefill gemm", "qk_norm+rope", "attention+prefill gemm", "norm+add+gated ffn", "norm+add"),
        *("linear", "per_layer_gate", "linear"),
    ],
}
Made = Callable[..., Pair]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Targets by shape, with chunks of 64 rows; files are written once."""
    files: dict[str, Path] = {}

    def make(shape: str, *, fuse: bool = True) -> Pair:
        if shape not in files:
            files[shape] = tmp_path_factory.mktemp(shape)
            make_target(files[shape], "gemma4_text", **SHAPES[shape])
        pair = Pair(files[shape], fuse=fuse)
        pair.geometry = replace(pair.geometry, prefill_chunk=64)
        return pair

    return make


def layer(made: Lowered, number: int) -> list[str]:
    """The groups from a layer's first projection to the next one's."""
    weights = [{name for op in group.ops for name in op.weights.values()} for group in made.groups]
    first, end = (
        next(place for place, names in enumerate(weights) if f"layers.{each}.{part}.weight" in names)
        for each in (number, number + 1)
        for part in ("qkv", "qk")
        if any(f"layers.{each}.{part}.weight" in names for names in weights)
    )
    return [group.name for group in made.groups[first:end]]


@pytest.mark.parametrize("shape", ["dense", later("moe"), "per-layer"])
def test_launches_of_a_layer_are_pinned(shape: str, pair_of: Made) -> None:
    pair = pair_of(shape)
    assert layer(pair.lower(depth=0, batch=1), 1) == STEP[shape]
    assert layer(pair.lower_program(build_prefill(pair.geometry)), 1) == PREFILL[shape]


@pytest.mark.parametrize("shape", [later("dense"), later("moe"), "per-layer"])
def test_every_operation_has_a_launch_of_its_own(shape: str, pair_of: Made) -> None:
    pair = pair_of(shape, fuse=False)
    for made in (pair.lower(depth=0, batch=1), pair.lower_program(build_prefill(pair.geometry))):
        assert all(len(group.ops) == 1 for group in made.groups)
        assert any(group.stage is Stage.PREFILL or group.stage is Stage.VERIFY for group in made.groups)


@pytest.mark.second
@pytest.mark.parametrize(
    ("shape", "options"),
    [("dense", {}), ("per-layer", {"tp_invariant": True}), later("moe", {}), wide("dense", {"tp_invariant": True})],
)
def test_ranks_have_kernels_for_these_layers(shape: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Norms on both sides of a sum over ranks; values that are keys, and keys of other layers, in parts."""
    own = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512, "moe_intermediate_size": 512}
    make_target(tmp_path, "gemma4_text", **{**SHAPES[shape], **own})
    shapes: dict[str, Any] = {"max_batch": 2, "max_context": 256, "block_size": 16, "prefill_chunk": 64}
    names = {}
    for size in (1, 2):
        given = RuntimeConfig(**shapes, dtype="bfloat16", tensor_parallel_size=size, **options)
        names[size] = list(kernels_of(tmp_path, None, given, H200))
    assert any("all_reduce_sum" in name for name in names[2]) and not any("all_reduce" in name for name in names[1])
    assert any(name.startswith("norm_add_n128_f32_eps1e-06_next") for name in names[2])
    assert any(name.startswith("rotate_q4_k1_v1_d512") and "keys_as_values" in name for name in names[2])


@pytest.mark.parametrize(
    "flags", [{"block": False}, {"block": True, "layers": 2}, {"block": True, "rank": 16}], ids=str
)
def test_draft_models_of_such_layers_have_their_fusions(flags: dict[str, Any], pair_of: Made, tmp_path: Path) -> None:
    """Heads of 512 that are values, too: of a block's rows, and of features, which give keys alone."""
    target = make_target(tmp_path / "target", "gemma4_text", **SHAPES["dense"])
    gemma_draft_model(tmp_path / "head", target, head=512, **flags)
    pair = Pair(tmp_path / "target", tmp_path / "head")
    step = pair.lower(depth=3, batch=2)
    drafting = [group.name for group in step.groups if group.stage.name.startswith("DRAFT")]
    assert {"qk_norm", "rms_norm", "scale", "cast"}.isdisjoint(drafting), drafting
    assert "norm+add" in drafting
    pair.lower_program(build_prefill(pair.geometry))
