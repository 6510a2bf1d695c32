"""Lowering of hybrids: what a gated delta net's operations become in a step and in prefill, together and alone."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from kernel_inventory import GPUS, examples, family
from lowered import Lowered, Pair
from lowering_cases import check_early_reads, check_savings, kinds_of, reached
from quantised_layers import quantise_target
from tiny_models import make_target
from tiny_mtp import add_mtp

from lowlat.graphs import Role
from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.step.prefill import build_prefill

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}  # fmt: skip
AMPERE = GPUS[8, 0]
ALONE = ["gated_delta_conv", "gated_delta", "gated_delta_norm"]
FUSED = re.compile(r"gated_delta_\d.*_(True|False)_(True|False)")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Pair]:
    """A hybrid of two delta nets around a layer of attention, with fusions and without."""
    path = tmp_path_factory.mktemp("hybrid")
    make_target(path, "qwen3_5_text", **SIZES)
    return {fuse: Pair(path, fuse=fuse) for fuse in (True, False)}


def nets_of(program: Program) -> Program:
    """A program's start and its delta nets, in a step with their projections."""
    own = ("delta_conv", "delta_rule", "delta_norm", "advance_states")
    ops = [
        op
        for op in program.ops
        if op.stage is Stage.ACTIVE_SLOTS
        or op.kind.removeprefix("prefill_") in own
        or (op.stage is Stage.VERIFY and any("delta" in name for name in op.weights.values()))
    ]
    return replace(program, ops=tuple(ops))


def step_of(pair: Pair, batch: int, gpu: Gpu = H200) -> Lowered:
    return pair.lower_program(nets_of(pair.program(0, batch)), gpu)


def delta_kinds(made: Lowered, stage: Stage = Stage.VERIFY) -> list[str]:
    """The kernels of delta nets, in order."""
    return [kind for kind in kinds_of(made, stage) if "delta" in kind or "advance" in kind]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_s_delta_net_is_one_launch(batch: int, pairs: Mapping[bool, Pair]) -> None:
    made = step_of(pairs[True], batch)
    assert delta_kinds(made) == ["gated_delta", "gated_delta", "advance_states"]
    alone = step_of(pairs[False], batch)
    assert delta_kinds(alone) == [*ALONE, *ALONE, "advance_states"]
    for each in (made, alone):
        check_early_reads(each)
    for group in made.groups:
        if group.name == "gated_delta+norm":
            (call,) = group.kernel_calls
            found = FUSED.fullmatch(call.kernel.name)
            assert found is not None and found[2] == "True"  # reads states before it waits
            assert call.kernel.cluster == 2 and call.kernel.waits_before_trigger
            for name in {each for op in group.ops for each in (*op.reads.values(), *op.writes.values())} - group.hidden:
                assert reached(group.kernel_calls, made.buffers[name]), name
            assert len(group.hidden) == 2
            assert not any(reached(group.kernel_calls, made.buffers[name]) for name in group.hidden)


def test_a_gpu_without_clusters_norms_heads_by_themselves(pairs: Mapping[bool, Pair]) -> None:
    made = step_of(pairs[True], 2, AMPERE)
    assert delta_kinds(made) == ["gated_delta", "gated_delta_norm", "gated_delta", "gated_delta_norm", "advance_states"]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("delta_conv", ALONE), ("delta_rule", ["gated_delta", "gated_delta_norm"]), ("delta_norm", ["gated_delta"])],
)
def test_an_operation_put_in_between_costs_the_fusion_alone(
    kind: str, wanted: list[str], pairs: Mapping[bool, Pair]
) -> None:
    program = nets_of(pairs[True].program(0, 1))
    place = next(place for place, op in enumerate(program.ops) if op.kind == kind)
    name = program.ops[place].writes["out"]
    copy = Op(
        "identity", Stage.VERIFY, MappingProxyType({"x": name}), MappingProxyType({"out": f"{name}.copy"}), {}, {}
    )
    buffers = {**program.buffers, f"{name}.copy": replace(program.buffers[name], name=f"{name}.copy")}
    ops = (*program.ops[: place + 1], copy, *program.ops[place + 1 :])
    made = pairs[True].lower_program(replace(program, ops=ops, buffers=MappingProxyType(buffers)))
    assert delta_kinds(made) == [*wanted, "gated_delta", "advance_states"]


def test_states_that_a_kernel_may_still_write_are_read_after_it(pairs: Mapping[bool, Pair]) -> None:
    """A second net over the same states, which no program has, waits for the first."""
    pair = pairs[True]
    program = nets_of(pair.program(0, 1))
    states = {
        name: f"{name.rpartition('.')[0]}.0" for name in program.buffers if re.match(r"(conv|delta)_\w+\.2", name)
    }
    assert len(states) == 5
    ops = [replace(op, writes={k: states.get(v, v) for k, v in op.writes.items()}) for op in program.ops]
    made = pair.lower_program(replace(program, ops=tuple(ops)))
    names = [call.kernel.name for call in made.calls if FUSED.fullmatch(call.kernel.name)]
    assert [name.endswith("_True") for name in names] == [True, False]


@pytest.mark.parametrize("gpu", [H200, AMPERE])
def test_prefill(gpu: Gpu, pairs: Mapping[bool, Pair]) -> None:
    net = ["prefill_gated_delta_conv", "gated_delta_tiles", "prefill_gated_delta", "gated_delta_norm"]
    for pair in pairs.values():
        program = nets_of(build_prefill(pair.geometry))
        made = pair.lower_program(program, gpu)
        assert delta_kinds(made, Stage.PREFILL) == [*net, *net, "advance_states"]
        for group in made.groups:
            for op in group.ops:
                if op.kind.startswith("prefill_delta"):
                    for name in (*op.reads.values(), *op.writes.values()):
                        if program.buffers[name].role is not Role.CONSTANT:
                            assert reached(group.kernel_calls, made.buffers[name]), (op.kind, name)


@pytest.mark.parametrize("gpu", [H200, AMPERE])
def test_a_prompt_s_narrow_gemm_is_a_product_and_a_sum_of_all_its_rows(gpu: Gpu, pairs: Mapping[bool, Pair]) -> None:
    for pair in pairs.values():
        made = pair.lower_program(build_prefill(pair.geometry), gpu)
        groups = [group for group in made.groups if any(op.kind == "narrow_linear" for op in group.ops)]
        assert len(groups) == 2
        for group in groups:
            assert [call.kernel.name.rpartition("_")[0] for call in group.kernel_calls] == ["narrow_gemm", "narrow_sum"]
            assert len(group.calls) == 2
            (op,) = group.ops
            assert reached(group.kernel_calls[:1], made.buffers[op.reads["x"]])
            assert reached(group.kernel_calls[1:], made.buffers[op.writes["out"]])


def test_every_kernel_has_an_example(pairs: Mapping[bool, Pair]) -> None:
    known = {family(kernel) for _, kernel in examples()}
    for pair in pairs.values():
        for made in (step_of(pair, 2), pair.lower_program(nets_of(build_prefill(pair.geometry)))):
            assert {family(call.kernel) for call in made.calls} <= known


@pytest.mark.parametrize("batch", [1, 8])
def test_norms_that_several_gemms_read_have_no_launch_of_their_own(batch: int, pairs: Mapping[bool, Pair]) -> None:
    """A narrow GEMM's launch makes them, or the first block of the wide one, which both leave them to the others."""
    made = pairs[True].lower(0, batch)
    groups = [group for group in made.groups if group.stage is Stage.VERIFY]
    names = [group.name for group in groups]
    assert "rms_norm" not in names
    assert [names.count(name) for name in ("norm+narrow gemm", "norm, kept+gemm", "narrow_linear")] == [1, 1, 1]
    for group, reader in itertools.pairwise(groups):
        if group.name in ("norm+narrow gemm", "norm, kept+gemm"):
            (call,) = group.kernel_calls
            assert reached((call,), made.buffers["normed"]) and "normed" not in group.hidden
            assert call.kernel.name.startswith("router" if "narrow" in group.name else "decode_gemm_float32")
            assert ("_kept" in call.kernel.name) == ("kept" in group.name)
        if group.name == "norm+narrow gemm":
            assert reader.name == "linear" and reached(reader.kernel_calls, made.buffers["normed"])
    gate = next(group for group in groups if group.name == "gemm+output_gate")
    assert reached(gate.kernel_calls, made.buffers["normed"])
    alone = [call.kernel.name for call in pairs[False].lower(0, batch).calls]
    assert sum(name.startswith("router") and "_alone" in name for name in alone) == 2


@pytest.mark.parametrize("layout", [None, "fp8-channel"])
def test_norms_that_several_gemms_of_a_prompt_read_leave_their_rows_both_ways(
    layout: str | None, tmp_path: Path
) -> None:
    """As the wide GEMM reads them, and as they are for a plain narrow one or for the gate of attention."""
    make_target(tmp_path, "qwen3_5_text", **SIZES)
    if layout is not None:
        quantise_target(tmp_path, layout, None)
    pair = Pair(tmp_path)
    program = build_prefill(replace(pair.geometry, prefill_chunk=64))
    made = pair.lower_program(program)
    found = [group for group in made.groups if group.name == "norm, kept+prefill gemm"]
    assert [[op.kind for op in group.ops] for group in found] == [
        ["add", "rms_norm", "linear"], ["add", "rms_norm", "narrow_linear", "linear"]
    ]  # fmt: skip
    for group in found:
        norm, *products = [call.kernel.name for call in group.kernel_calls]
        plain = tuple(call for call in group.kernel_calls if call.kernel.name.startswith("narrow_gemm"))
        (normed,) = (op.writes["out"] for op in group.ops if op.kind == "rms_norm")
        assert norm.startswith("arranged_kept_add_norm") and reached(group.kernel_calls[:1], made.buffers[normed])
        assert not group.hidden and not reached(
            tuple(call for call in group.kernel_calls[1:] if call not in plain), made.buffers[normed]
        )
        has_narrow = any(op.kind == "narrow_linear" for op in group.ops)
        is_packed = layout is not None and has_narrow
        assert len(plain) == (has_narrow and not is_packed) == reached(plain, made.buffers[normed])
        assert sum(name.startswith("prefill_gemm") for name in products) == 1 + is_packed
        assert not any(name.startswith("arrange") for name in products)
    assert check_savings(made) >= {group.name for group in found}


def test_gated_attention_may_have_biases(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen3_5_text", attention_bias=True, **SIZES)
    made = Pair(tmp_path).lower(0, 2)
    gate = next(group for group in made.groups if group.name == "gemm+output_gate")
    (call,) = gate.kernel_calls
    assert reached((call,), made.weights.bias("layers.1.gate.bias"))
    assert any(reached(group.kernel_calls, made.weights.bias("layers.1.qkv.bias")) for group in made.groups)


@pytest.mark.parametrize("fuse", [True, False])
def test_an_mtp_layer_lowers(fuse: bool, tmp_path: Path) -> None:
    """Every draft is fc, one layer and the LM head; with fusions its input is one launch, and its gate a GEMM's end."""
    make_target(tmp_path, "qwen3_5_text", **SIZES)
    add_mtp(tmp_path)
    pair = Pair(tmp_path, fuse=fuse, method="mtp", num_speculative_tokens=3)
    made = pair.lower_program(pair.program(3, 1))
    kinds = [kind for stage in Stage if stage.startswith("DRAFT") for kind in kinds_of(made, stage)]
    assert kinds.count("draft_level_input") == (2 if fuse else 0)
    assert kinds.count("decode_gemm_gate") == (3 if fuse else 0) and kinds.count("output_gate") == (0 if fuse else 3)
    assert kinds.count("attention") == 3
