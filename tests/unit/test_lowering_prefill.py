"""Lowering of prefill: operations that leave their rows as the GEMM after them reads them, and where they do not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from inserted import with_identities
from kernel_inventory import GPUS
from lowered import Lowered, Pair
from lowering_cases import SIZES, check_savings, kinds_of, reached, span, write_pair
from tiny_models import make_target

from lowlat.graphs import Role
from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.step.prefill import build_prefill

NAMES = ("llama", "qwen3", "biased", "llama_fp8", "gpt_oss+alone", "llama+several_layers")
ARRANGING, GEMM, NORM = "arrange_activations", "prefill_gemm", "arranged_add_norm"
ADD = ("add_bf16", "norms")
OWN = {"norm+gated ffn": "rms_norm", "norm+prefill gemm": "rms_norm", "attention+prefill gemm": "prefill_attention"}
Made = Callable[..., Pair]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Pairs by name, with chunks of 64 rows; files are written once."""
    files: dict[str, tuple[Path, Path | None]] = {}

    def make(name: str, *, fuse: bool = True, **shape: Any) -> Pair:
        if name not in files:
            files[name] = write_pair(name, tmp_path_factory.mktemp("pair"))
        pair = Pair(*files[name], fuse=fuse)
        pair.geometry = replace(pair.geometry, **{"prefill_chunk": 64, **shape})
        return pair

    return make


def lowered(pair: Pair, program: Program | None = None) -> Lowered:
    return pair.lower_program(build_prefill(pair.geometry) if program is None else program)


def names_of(made: Lowered) -> list[str]:
    return [group.name for group in made.groups]


def count(made: Lowered, kind: str) -> int:
    return kinds_of(made, Stage.PREFILL).count(kind)


def test_kernels_of_a_layer(pair_of: Made) -> None:
    """From rotation on, and to the next layer's: their number is pinned."""
    attention = ["gather_kv", "prefill_flash"]
    layer = ["rotate", *attention, GEMM, NORM, GEMM, GEMM, NORM, GEMM]
    kinds = kinds_of(lowered(pair_of("llama")), Stage.PREFILL)
    assert kinds[: 3 + len(layer)] == ["embed_norm", ARRANGING, GEMM, *layer]
    ffn = [ARRANGING, GEMM, "silu_mul", ARRANGING, GEMM]
    alone = ["rotate", "prefill_kv_write", *attention, ARRANGING, GEMM, *ADD, *ffn, *ADD, ARRANGING, GEMM]
    qwen = kinds_of(lowered(pair_of("qwen3")), Stage.PREFILL)
    assert qwen[: len(kinds)] == kinds  # heads are normed where they are rotated
    kinds = kinds_of(lowered(pair_of("llama", fuse=False)), Stage.PREFILL)
    assert kinds[: 4 + len(alone)] == ["embed", "norms", ARRANGING, GEMM, *alone]


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_hidden_are_neither_reached_nor_read_again(name: str, pair_of: Made) -> None:
    """And every call stays in memory that somebody owns, also where identities interrupt fusions."""
    pair = pair_of(name)
    plain = build_prefill(pair.geometry)
    for program in (plain, *(with_identities(plain, 12, seed) for seed in range(3))):
        made = lowered(pair, program)
        assert [op for group in made.groups for op in group.ops] == list(program.ops)
        owned = sorted(span(tensor) for tensor in made.owned() if tensor.numel())
        place = 0
        for group in made.groups:
            place += len(group.ops)
            for hidden in group.hidden:
                assert program.buffers[hidden].role is Role.SCRATCH and not is_read(program, hidden, place)
            if group.name in OWN:
                (rows,) = (op.writes["out"] for op in group.ops if op.kind == OWN[group.name])
                assert not reached(group.kernel_calls, made.buffers[rows]), group.name
            for call in group.kernel_calls:
                for start, end in (span(each) for each in tensors_of(call)):
                    assert any(low <= start and end <= high for low, high in owned), call.kernel.name


def tensors_of(call: KernelCall) -> list[torch.Tensor]:
    return [each for each in call.arguments if isinstance(each, torch.Tensor) and each.numel()]


def is_read(program: Program, name: str, place: int) -> bool:
    """Whether an operation from a place on reads what a buffer holds there."""
    for op in program.ops[place:]:
        if name in op.reads.values():
            return True
        if name in op.writes.values() and name not in op.updates:
            return False
    return False


@pytest.mark.parametrize("name", ["llama", "biased", "qwen3"])
def test_fusions_save_the_launches_that_they_say(name: str, pair_of: Made) -> None:
    pair = pair_of(name)
    made = lowered(pair)
    found = check_savings(made)
    assert found >= set(OWN)


def interrupted(program: Program, place: int) -> Program:
    """The program with a copy of what an operation writes after it, which the operations after it read."""
    op = program.ops[place]
    (name,) = op.writes.values()
    buffers = {**program.buffers, "copy": replace(program.buffers[name], name="copy")}
    copy = Op("identity", op.stage, MappingProxyType({"x": name}), MappingProxyType({"out": "copy"}), {}, {})
    ops, moves = [*program.ops[: place + 1], copy], True
    for each in program.ops[place + 1 :]:
        reads = {key: "copy" if moves and buffer == name else buffer for key, buffer in each.reads.items()}
        ops.append(replace(each, reads=MappingProxyType(reads)))
        moves = moves and name not in each.writes.values()
    made = replace(program, ops=tuple(ops), buffers=MappingProxyType(buffers))
    made.validate()
    return made


@pytest.mark.parametrize(
    ("kind", "lost", "instead"),
    [
        ("rms_norm", ["norm+gated ffn"], ["add+norm", "identity", "gated ffn"]),
        ("add", ["norm+gated ffn"], ["add", "identity", "norm+gated ffn"]),
        ("prefill_attention", ["attention+prefill gemm"], ["prefill_attention", "identity", "linear"]),
        ("silu_mul", ["norm+gated ffn"], ["norm+prefill gemm", "silu_mul", "identity", "linear"]),
    ],
)
def test_an_operation_in_between_costs_the_fusion_alone(
    kind: str, lost: list[str], instead: list[str], pair_of: Made
) -> None:
    pair = pair_of("llama")
    program = build_prefill(pair.geometry)
    first = next(place for place, op in enumerate(program.ops) if op.kind == "prefill_attention")
    place = next(place for place in range(first, len(program.ops)) if program.ops[place].kind == kind)
    plain, made = names_of(lowered(pair)), names_of(lowered(pair, interrupted(program, place)))
    at = plain.index(lost[0])
    assert made == [*plain[:at], *instead, *plain[at + len(lost) :]]


def test_rows_that_are_read_again_stay_rows(pair_of: Made) -> None:
    """An MoE layer's router and experts read the norm's rows, and so does whoever else does."""
    made = lowered(pair_of("gpt_oss+alone"))
    assert count(made, NORM) == 1  # the second layer's, before its qkv
    pair = pair_of("llama")
    program = build_prefill(pair.geometry)
    place = next(place for place, op in enumerate(program.ops) if op.kind == "silu_mul")
    (normed,) = (program.ops[place - 1].reads["x"],)
    buffers = {**program.buffers, "copy": replace(program.buffers[normed], name="copy")}
    reader = Op("identity", Stage.PREFILL, MappingProxyType({"x": normed}), MappingProxyType({"out": "copy"}), {}, {})
    ops = (*program.ops[: place + 2], reader, *program.ops[place + 2 :])
    made = lowered(pair, replace(program, ops=ops, buffers=MappingProxyType(buffers)))
    names = names_of(made)
    assert ["add+norm", "gated ffn", "identity"] in [names[at : at + 3] for at in range(len(names))]


def test_quantised_gates_are_activated_where_they_are_multiplied(pair_of: Made) -> None:
    kinds = kinds_of(lowered(pair_of("llama_fp8")), Stage.PREFILL)
    ffn = [NORM, "prefill_gemm_fp8", "prefill_gemm_fp8"]
    assert ffn in [kinds[at : at + len(ffn)] for at in range(len(kinds))]


@pytest.mark.parametrize(
    ("hidden", "ffn"),
    [
        (640, ["prefill_gemm_192x640_5x2_64x2x4_whole_plain_gated"]),
        (704, ["prefill_gemm_192x704_6x2_64x1x8_apart_plain_inplace", "gated_wide_add_192x6_plain"]),
    ],
)
def test_gates_are_activated_where_segments_of_k_are_added_up(hidden: int, ffn: list[str], tmp_path: Path) -> None:
    """By the block, or by the launch after it where blocks have segments of their own."""
    make_target(tmp_path, "llama", num_hidden_layers=1, **{**SIZES, "hidden_size": hidden})
    pair = Pair(tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=64)
    made = lowered(pair)
    names = [call.kernel.name for call in made.calls]
    place = names.index(ffn[0])
    assert names[place - 1].startswith(NORM) and names[place + len(ffn)].startswith(f"prefill_gemm_{hidden}x96_1x2")
    assert names[place : place + len(ffn)] == ffn
    assert "norm+gated ffn" in check_savings(made)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
def test_weights_that_are_not_taken_are_multiplied_as_ever(capability: tuple[int, int], pair_of: Made) -> None:
    """In chunks of 32 rows, two of which make 64, and on GPUs without such instructions."""
    pair = pair_of("llama", prefill_chunk=32, max_prefill_chunks=2)
    made = pair.lower_program(build_prefill(pair.geometry, 64), GPUS[capability])
    assert (set(names_of(made)) >= set(OWN)) == (capability == (9, 0))
    kinds = kinds_of(made, Stage.PREFILL)
    assert GEMM not in kinds and ARRANGING not in kinds and NORM not in kinds
    assert kinds.count("add_norm") == 3 and kinds.count("silu_mul") == 2
