"""A mixture of experts lowered without a GPU: its launches, what they hand to each other, and where it is not fused."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Lowered, Pair
from lowering_cases import MOE_LAYERS, TARGETS, LoweredPairs, kinds_of, span
from tiny_models import make_target
from tiny_mtp import add_mtp

from lowlat.errors import ConfigError
from lowlat.graphs import Bucket, BufferSpec, Role
from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.toolchain.kernel import H200, KernelCall
from lowlat.lowering.binding import Binding
from lowlat.lowering.lower import LoweredGroup, lower
from lowlat.step.adaptive import build_adaptive
from lowlat.step.prefill import build_prefills

# of an MoE layer's layer; a short window needs no second launch for its attention
MOE_HEAD, MOE_TAIL = ["decode_gemm_rotate", "attention"], ["decode_gemm_add", "router", "experts_mlp"]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> LoweredPairs:
    """Buckets of pairs by name."""
    return LoweredPairs(tmp_path_factory)


@pytest.mark.parametrize("name", MOE_LAYERS)
@pytest.mark.parametrize(("depth", "batch"), [(0, 1), (0, 8), (7, 8)])
def test_kernels_of_a_moe_s_layers(name: str, depth: int, batch: int, lowered: LoweredPairs) -> None:
    """Windows first, then all positions: 5 launches and 6; windows of more than a few tiles have 6 too. The product
    after the experts norms up to eight rows for itself."""
    kinds = kinds_of(lowered(f"{name}+{'plain' if depth else 'alone'}", depth, batch), Stage.VERIFY)
    rows = batch * (depth + 1)
    tail = MOE_TAIL if rows <= 8 else [*MOE_TAIL, "norms"]
    short = [*MOE_HEAD, *tail] if name == "gpt_oss" else [*MOE_HEAD, "attention_combine", *tail]
    full = [*MOE_HEAD, "attention_combine", *tail]
    assert kinds == ["embed_norm", *short, *full, "decode_gemm_float32"]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_fp8"])
@pytest.mark.parametrize(("depth", "batch"), [(0, 1), (7, 8)])
def test_experts_without_biases(name: str, depth: int, batch: int, lowered: LoweredPairs) -> None:
    """Heads are normed between product and rotation; a launch has at most 256 pairs; scales of rows are handed over."""
    step, rows = lowered(f"{name}+{'plain' if depth else 'alone'}", depth, batch), batch * (depth + 1)
    found = [call for call in step.calls if call.kernel.name.startswith(("router", "experts_mlp"))]
    assert len(found) == 2 * (2 if rows < 64 else 3)
    for call in found:
        given = named(call)
        assert given["bias"] == 0 and "unbiased" in call.kernel.name
        if "experts_mlp" in call.kernel.name:
            assert given["down_bias"] == 0 and given["limit"] == 0 and "_plain" in call.kernel.name
            assert isinstance(given["row_scales"], torch.Tensor) == name.endswith("fp8")
            assert ("over_all" in call.kernel.name) == name.endswith("fp8")


SHARED_SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 64, "num_experts": 20, "num_experts_per_tok": 8} | {
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}


def with_shared(directory: Path, inner: int) -> Pair:
    """A target whose tokens choose 8 of 20 experts of 96, with a shared one; norms are bf16."""
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    sizes = {**SHARED_SIZES, "shared_expert_intermediate_size": inner}
    make_target(directory, "qwen3_5_moe_text", **sizes, **layers)
    pair = Pair(directory)
    pair.source.update({name: each.bfloat16() for name, each in pair.source.items() if "norm" in name})
    return pair


def ungated(program: Program) -> Program:
    """A program whose attention has no output gate: this is about its FFNs."""
    ops = (
        replace(op, kind="identity", reads={"x": op.reads["x"]}) if op.kind == "output_gate" else op
        for op in program.ops
    )
    return replace(program, ops=tuple(ops))


def test_a_shared_expert_of_the_same_size_is_one_more_expert(tmp_path: Path) -> None:
    """It costs no launch, in a step and in a prompt."""
    pair = with_shared(tmp_path, 96)
    step = pair.lower_program(ungated(pair.program(0, 8)))
    for router, layer in moe_layers_of(step):
        assert layer["ids"].shape == layer["shares"].shape == (8, 9) and layer["words"].shape[0] == 21
        assert router["logits"].shape == layer["logits"].shape == (8, 21)
    names = [call.kernel.name for call in step.calls if call.kernel.name.startswith(("router", "experts"))]
    assert len(names) == 4 and all(name.endswith("_e21_shared") for name in names[1::2])
    prefill = ungated([*build_prefills(pair.geometry).values()][-1])
    routed = [call.kernel.name for call in pair.lower_program(prefill).calls if "route" in call.kernel.name]
    assert [name for name in routed if name.startswith("route_")] == ["route_top_k_21x9_shared"] * 2


def test_a_shared_expert_of_another_size_is_an_ffn_whose_gate_is_a_product(tmp_path: Path) -> None:
    pair = with_shared(tmp_path, 64)
    for program in (pair.program(0, 8), [*build_prefills(pair.geometry).values()][-1]):
        lowered = pair.lower_program(ungated(program))
        names = [call.kernel.name for call in lowered.calls]
        assert names.count("add_gated_64") == 2 and not any("shared" in name for name in names)
        assert sum(name.startswith("route_top_k_20x8") for name in names) == 2


def moe_layers_of(step: Lowered) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each layer of the target: the arguments of the router and of the MoE layer by name."""
    calls = step.calls
    places = [place for place, call in enumerate(calls) if call.kernel.name.startswith("experts_mlp")]
    assert len(places) == 2
    assert all(calls[place - 1].kernel.name.startswith("router") for place in places)
    return [(named(calls[place - 1]), named(calls[place])) for place in places]


def named(call: KernelCall) -> dict[str, Any]:
    """A call's arguments by the names of its kernel's parameters."""
    return dict(zip(inspect.signature(call.kernel.function).parameters, call.arguments, strict=True))


def same(one: Any, other: Any) -> bool:
    """Whether two tensors are one."""
    return (one.data_ptr(), one.shape, one.dtype) == (other.data_ptr(), other.shape, other.dtype)


@pytest.mark.parametrize("name", MOE_LAYERS)
@pytest.mark.parametrize(("depth", "batch"), [(0, 1), (7, 8)])
def test_a_moe_takes_what_its_layer_s_router_left(name: str, depth: int, batch: int, lowered: LoweredPairs) -> None:
    """The same logits and flags, and the memory that it filled; what one layer leaves, the next one overwrites."""
    step, rows = lowered(f"{name}+plain", depth, batch), batch * (depth + 1)
    shared = set()
    for layer, (router, moe) in enumerate(moe_layers_of(step)):
        assert router["logits"].shape == (rows, TARGETS[name][1]["num_local_experts"])
        assert same(moe["logits"], router["logits"]) and same(moe["x"], router["normed"])
        assert router["row_live"].data_ptr() == moe["row_live"].data_ptr() == step.buffers["row_live"].data_ptr()
        assert moe["row_live"].numel() == router["row_live"].numel() == rows
        assert same(moe["activated"], router["first_awaited"])
        assert same(moe["partials"], router["second_awaited"])
        for place in ("first", "second", "third"):
            filled = router[f"{place}_awaited"]
            assert 16 * router[f"{place}_chunks"] == filled.numel() * filled.element_size()
        assert same(moe["ids"], step.buffers[f"expert_ids.layers.{layer}"])
        assert same(moe["shares"], step.buffers["expert_weights"])
        assert same(moe["residual"], router["x"])
        assert moe["total"].shape == router["x"].shape and not same(moe["total"], router["x"])
        shared.add((moe["activated"].data_ptr(), moe["partials"].data_ptr()))
    ((_, partials),) = shared
    assert partials in {tensor.data_ptr() for tensor in step.workspace.tensors()}


@pytest.mark.parametrize("name", MOE_LAYERS)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_router_fills_the_next_moe_s_logits(name: str, batch: int, lowered: LoweredPairs) -> None:
    """And not its own, which are awaited already; the first MoE layer's are filled by nobody, and it waits for them."""
    filled = None
    for layer, (router, moe) in enumerate(moe_layers_of(lowered(f"{name}+alone", 0, batch))):
        assert moe["early"] == int(layer > 0)
        if filled is not None:
            assert filled.data_ptr() == router["logits"].data_ptr()
            assert filled.numel() >= router["logits"].numel()
        filled = router["third_awaited"]
        (start, end), (own, _) = span(filled), span(router["logits"])
        assert not start <= own < end


@pytest.mark.parametrize("length", [1, 3])
def test_draft_steps_of_one_row_fill_all_logits_of_the_target_s_rows(length: int, tmp_path: Path) -> None:
    """A body of chosen length drafts before it verifies, so an MoE layer of one row is before one of several."""
    make_target(tmp_path, "qwen3_5_moe_text", num_hidden_layers=1, layer_types=["full_attention"], **SHARED_SIZES)
    add_mtp(tmp_path)
    pair = Pair(tmp_path, method="mtp", num_speculative_tokens=3, adaptive_width=True)
    step, rows, filled = pair.lower_program(build_adaptive(pair.geometry, Bucket(1, length + 1, length))), [], None
    routers = {}
    for call in step.calls:
        if call.kernel.name.startswith("router"):
            routers = named(call)
            rows.append(routers["logits"].shape[0])
        elif call.kernel.name.startswith("experts_mlp"):
            assert named(call)["early"] == int(filled is not None)
            if filled is not None:
                (start, end), (low, high) = filled, span(named(call)["logits"])
                assert start <= low and high <= end
            filled = span(routers["third_awaited"])
    assert rows == [1] * length + [length + 1]


def test_experts_are_packed_and_their_parts_are_not_kept(lowered: LoweredPairs) -> None:
    for name in MOE_LAYERS:
        step = lowered(f"{name}+alone", 0, 1)
        for part in ("gate_up", "down"):
            packed = step.weights.experts(f"layers.1.experts.{part}")
            assert (packed.scales is not None) == name.endswith("mxfp4")
            assert packed.order is None or part == "gate_up"
            for missing in ("weight", "blocks", "scales"):
                with pytest.raises(ConfigError, match="is missing"):
                    step.weights.vector(f"layers.1.experts.{part}.{missing}")
        bias, order = step.weights.experts_bias("layers.1.experts.gate_up"), gate_up_permutation(96)
        assert torch.equal(bias, step.weights.vector("layers.1.experts.gate_up.bias")[:, order])


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("router", "x"),
        ("router", "row_live"),
        ("experts_gate_up", "x"),
        ("experts_gate_up", "expert_ids"),
        ("experts_down", "activated"),
        ("experts_down", "expert_ids"),
        ("experts_down", "expert_weights"),
        ("add", "b"),
    ],
)
def test_moe_layers_that_read_anything_else_are_not_fused(kind: str, argument: str, lowered: LoweredPairs) -> None:
    """They are lowered all the same, operation by operation."""
    step = lowered("gpt_oss+alone", 0, 2)
    groups = lower_with_other_input(step, place_of(step, "router", kind), argument)
    assert [group.name for group in step.groups].count("moe") == 2
    assert [group.name for group in groups].count("moe") == 1


def test_weighed_products_that_others_read_are_written(lowered: LoweredPairs) -> None:
    step = lowered("gpt_oss+alone", 0, 2)
    down = place_of(step, "experts_down")
    product = step.program.ops[down].writes["out"]
    cast = Op("cast", Stage.VERIFY, {"x": product}, {"out": "rounded"}, {}, {})
    ops = (*step.program.ops[: down + 2], cast, *step.program.ops[down + 2 :])
    spec = BufferSpec("rounded", step.buffers[product].shape, torch.bfloat16, Role.SCRATCH)
    program = replace(step.program, ops=ops, buffers={**step.program.buffers, "rounded": spec})
    buffers = {**step.buffers, "rounded": torch.zeros(spec.shape, dtype=spec.dtype)}
    groups = lower(Binding(program, buffers, step.weights, H200, step.workspace))
    assert [group.name for group in groups].count("moe") == 1
    assert any(product in group.written for group in groups)


def place_of(step: Lowered, *kinds: str) -> int:
    """Of the first operation of the last kind from the first one of the kind before on."""
    place = 0
    for kind in kinds:
        place = next(number for number, op in enumerate(step.program.ops) if number >= place and op.kind == kind)
    return place


def lower_with_other_input(step: Lowered, place: int, argument: str) -> tuple[LoweredGroup, ...]:
    """Lower the program, one argument of one operation a copy of its buffer."""
    ops, buffers, specs = list(step.program.ops), dict(step.buffers), dict(step.program.buffers)
    own = ops[place].reads[argument]
    buffers["copy"] = step.buffers[own].clone()
    specs["copy"] = replace(specs[own], name="copy", role=Role.STATE)
    ops[place] = replace(ops[place], reads={**ops[place].reads, argument: "copy"})
    program = replace(step.program, ops=tuple(ops), buffers=specs)
    return lower(Binding(program, buffers, step.weights, H200, step.workspace))
