"""This module lowers GEMMs of a chunk of prefill: by packed weights where the GPU has wgmma, else by torch.

Numbers of a quantised matrix are rounded to bf16, in registers or by the launch that unpacks it; FP8 by row and NVFP4
are exact, as the scales of their rows multiply what comes out.

A row's bits depend on the row and the weight alone: in our GEMM because rows are computed independently, in torch's
because it always multiplies a whole chunk, padded where there are fewer rows.

Our GEMM reads rows that are arranged. Fusions let the operation before it leave them so, see `prefill_fusions`; else a
launch arranges them. Where an operation asks for codes of rows, one more launch makes them of the arranged rows.
"""

from collections.abc import Sequence
from math import prod

import torch

from lowlat.errors import ConfigError
from lowlat.graphs.program import Op, Stage
from lowlat.kernels.elementwise.elementwise import soft_cap
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import PackedMatrix, unpack_rows
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.gemm.prefill.arranged import ArrangedGemm, arranged_gemm
from lowlat.kernels.gemm.prefill.coded_rows import CodedRows, code_arranged, code_rows, coded_shape
from lowlat.kernels.gemm.prefill.plan import APART_ROWS, cut_of
from lowlat.kernels.gemm.tiles import BF16_TILES
from lowlat.kernels.gemm.unpacking import unpack_weight, unpacked_shape
from lowlat.kernels.toolchain.kernel import Gpu, WorkspaceShape
from lowlat.lowering.binding import Binding, Call, LibraryCall
from lowlat.lowering.implementations import Implementation, lower_by
from lowlat.lowering.weight_parts import GEMMS, PACKED

__all__ = [
    "AT_ONCE", "PROMPT_LINEAR", "activation_workspace", "arranged_rows", "asks_for_codes", "code_memory", "code_result",
    "codes_workspace", "gemm_of", "given_rows", "multiply_arranged", "multiply_prompt", "partial_sums", "parts_of",
]  # fmt: skip

AT_ONCE = KParts(1, 1)  # all of K: where no bit may depend on ranks, who have parts of a weight's rows


def activation_workspace(rows: int, width: int) -> WorkspaceShape:
    """The workspace of an activation [M, I] between two GEMMs, arranged."""
    return "prefill.activated", arranged_shape(rows, width), torch.bfloat16


def codes_workspace(rows: int, width: int) -> WorkspaceShape:
    """The workspace of the codes of rows [M, K], and their scales."""
    return "prefill.codes", coded_shape(rows, width), torch.uint8


def gemm_of(binding: Binding, op: Op) -> ArrangedGemm | None:
    """Our GEMM that multiplies as an operation asks, on this GPU, in the program's chunks; None where none does."""
    gemm, weight = arranged_gemm(binding.gpu), binding.weights.matrix(op.weights["weight"])
    if gemm is None or not gemm.covers(binding.prefill_chunk, weight):
        return None
    return None if asks_for_codes(op) and not gemm.takes_codes(weight) else gemm


def asks_for_codes(op: Op) -> bool:
    """Whether a GEMM asks for codes of its rows."""
    return op.params.get("activations") is not None


def code_result(binding: Binding, op: Op, arranged: torch.Tensor) -> tuple[Sequence[Call], torch.Tensor | CodedRows]:
    """The call that codes rows for an operation's GEMM, if it asks for codes, and what the GEMM then reads."""
    if not asks_for_codes(op):
        return (), arranged
    codes = code_memory(binding, arranged.shape[1], binding.weights.matrix(op.weights["weight"]).columns)
    return code_arranged(arranged=arranged, out=codes), codes


def given_rows(binding: Binding, op: Op) -> tuple[Sequence[Call], torch.Tensor | CodedRows]:
    """The call that arranges an operation's rows, or codes them, and what its GEMM then reads."""
    rows = binding.arguments(op)["x"]
    if asks_for_codes(op):
        codes = code_memory(binding, *rows.shape)
        return code_rows(x=rows, out=codes), codes
    arranged = arranged_rows(binding, op)
    return arrange(x=rows, out=arranged), arranged


def code_memory(binding: Binding, rows: int, width: int) -> CodedRows:
    """The workspace of codes of rows [M, K]."""
    return CodedRows(binding.workspace(*codes_workspace(rows, width)), rows, width)


def multiply_prompt(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of `linear` over the rows of prefill: x [M, K] @ weight.T + bias, float32 [M, N]."""
    return lower_by(PROMPT_LINEAR, binding, op)


def _capped(binding: Binding, op: Op) -> Sequence[Call]:
    """The softcap of a GEMM's output, where the operation has one."""
    given = binding.arguments(op)
    cap = given.get("softcap")
    return () if cap is None else soft_cap(given["out"], cap)


def _by_library(binding: Binding, op: Op) -> Sequence[Call]:
    """By the matrix library, from a matrix that is unpacked first."""
    given, name = binding.arguments(op), op.weights["weight"]
    weight, chunk = binding.weights.matrix(name), binding.prefill_chunk
    if binding.is_invariant:
        raise ConfigError(
            f"{binding.program.name}: tp_invariant needs prefill's own GEMMs, of GPUs of capability 9.0, chunks of a "
            f"multiple of 64 and widths of 8, and {name} would be multiplied by a matrix library, whose "
            f"order of sums its width decides (capability {binding.gpu.capability}, prefill_chunk {chunk}, "
            f"{weight.rows} x {weight.columns}); leave it out, or use executor 'reference'"
        )
    if asks_for_codes(op):
        raise ConfigError(
            f"{binding.program.name}: activations 'fp8' needs prefill's own GEMMs, of GPUs of capability 9.0, chunks "
            f"of a multiple of 64, and weights in FP8 with a scale for each row, of sizes that are multiples of 8 and "
            f"128; {name} is {weight.tile_format.label}, {weight.rows} x {weight.columns} (capability "
            f"{binding.gpu.capability}, prefill_chunk {chunk}); leave it out, or use executor 'reference'"
        )
    bias = binding.weights.vector(op.weights["bias"]) if "bias" in op.weights else None
    calls: list[Call] = []
    unpacked: torch.Tensor | None = None
    if weight.tile_format != BF16_TILES:
        shape = unpacked_shape(weight.rows, weight.columns)
        held = binding.workspace("prefill.unpacked", (_most_unpacked(binding),), torch.bfloat16)
        unpacked = held[: shape[0] * shape[1]].view(shape)
        calls += unpack_weight(weight=weight, out=unpacked)
    arguments = {
        "x": given["x"], "weight": weight, "unpacked": unpacked, "bias": bias, "places": binding.weights.places(name),
        "chunk": chunk, "out": given["out"],
    }  # fmt: skip
    return [*calls, LibraryCall("linear", _by_unpacked, arguments, is_fallback=True), *_capped(binding, op)]


def _most_unpacked(binding: Binding) -> int:
    """Numbers of the largest quantised matrix that the program multiplies by, unpacked; not of an LM head of decode."""
    names = {op.weights["weight"] for op in binding.program.ops if op.kind in GEMMS and op.stage is Stage.PREFILL}
    matrices = [binding.weights.matrix(name) for name in names if binding.weights.is_packed(name)]
    return max(prod(unpacked_shape(each.rows, each.columns)) for each in matrices if each.tile_format != BF16_TILES)


def _by_arranged(binding: Binding, op: Op) -> Sequence[Call]:
    """By our GEMM, after a launch that arranges the rows."""
    given, weight = binding.arguments(op), binding.weights.matrix(op.weights["weight"])
    gemm, columns = gemm_of(binding, op), binding.weights.runs(op.weights["weight"])
    if gemm is None:
        raise ValueError(f"no GEMM of ours multiplies by {op.weights['weight']}")
    calls: list[Call] = []
    parts = parts_of(binding, op, weight)
    most = gemm.at_once(1 if parts is None else parts.count)
    for rows, results in zip(given["x"].split(most), given["out"].split(most), strict=True):
        x: torch.Tensor | CodedRows
        if asks_for_codes(op):
            x = code_memory(binding, *rows.shape)
            calls += code_rows(x=rows, out=x)
        else:
            x = _arranged_memory(binding, *rows.shape)
            calls += arrange(x=rows, out=x)
        calls += gemm.multiply(
            arranged=x, weight=weight, bias=binding.bias(op), columns=columns,
            partials=partial_sums(binding, op, rows.shape[0]), out=results, gpu=binding.gpu, parts=parts,
        )  # fmt: skip
    return [*calls, *_capped(binding, op)]


def parts_of(binding: Binding, op: Op, weight: PackedMatrix) -> KParts | None:
    """The parts of K in which a GEMM sums: its operation's, or all of K at once; None: as its kernels like."""
    return binding.k_parts(op, weight.columns) or (AT_ONCE if binding.is_invariant else None)


def arranged_rows(binding: Binding, op: Op) -> torch.Tensor:
    """The workspace of a GEMM's arranged rows."""
    return _arranged_memory(binding, *binding.buffers[op.reads["x"]].shape)


def _arranged_memory(binding: Binding, rows: int, width: int) -> torch.Tensor:
    """The workspace of rows [M, K] that are arranged."""
    return binding.workspace("prefill.arranged", arranged_shape(rows, width), torch.bfloat16)


def partial_sums(binding: Binding, op: Op, rows: int) -> torch.Tensor:
    """The workspace of the sums of segments of K of an operation's GEMM over so many rows, [S, rows, N].

    It has at most APART_ROWS rows: more never keep segments apart. Of codes K counts two columns as one.
    """
    weight = binding.weights.matrix(op.weights["weight"])
    width = weight.columns // 2 if asks_for_codes(op) else weight.columns
    segments = cut_of(weight.rows, width, parts_of(binding, op, weight))[0]
    shape = (segments if segments > 1 else 0, min(rows, APART_ROWS), weight.rows)
    return binding.workspace("prefill.partials", shape, torch.float32)


def multiply_arranged(binding: Binding, op: Op, gemm: ArrangedGemm, x: torch.Tensor | CodedRows) -> Sequence[Call]:
    """The calls of `linear` over rows that are arranged, or coded, which one GEMM takes."""
    weight, out = binding.weights.matrix(op.weights["weight"]), binding.buffers[op.writes["out"]]
    parts = parts_of(binding, op, weight)
    product = gemm.multiply(
        arranged=x, weight=weight, bias=binding.bias(op), columns=binding.weights.runs(op.weights["weight"]),
        partials=partial_sums(binding, op, out.shape[0]), out=out, gpu=binding.gpu, parts=parts,
    )  # fmt: skip
    return [*product, *_capped(binding, op)]


def _by_unpacked(
    x: torch.Tensor,
    *,
    weight: PackedMatrix,
    unpacked: torch.Tensor | None,
    bias: torch.Tensor | None,
    places: torch.Tensor | None,
    chunk: int,
    out: torch.Tensor,
) -> None:
    scales = weight.scales
    matrix = unpack_rows(weight) if unpacked is None else unpacked[: weight.rows, : weight.columns]
    if places is None:
        _multiply_chunks(x, matrix, chunk, out)
        packed = out
    else:
        packed = torch.empty(x.shape[0], matrix.shape[0], dtype=torch.float32, device=x.device)
        _multiply_chunks(x, matrix, chunk, packed)
    if scales is not None:
        packed *= scales[: weight.rows]
    if places is not None:
        torch.index_select(packed, 1, places, out=out)
    if bias is not None:
        out += bias


def _multiply_chunks(x: torch.Tensor, weight: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
    """x [M, K] @ weight.T [K, N] bf16 into float32 [M, N], `chunk` rows at a time, accumulated in float32.

    The matrix library takes other ways for other shapes, and a chunk's bits must not depend on those next to it: a part
    of a chunk is padded.
    """
    short = -x.shape[0] % chunk
    if short:
        whole = torch.empty(x.shape[0] + short, weight.shape[0], dtype=torch.float32, device=x.device)
        _multiply_chunks(torch.nn.functional.pad(x, (0, 0, 0, short)), weight, chunk, whole)
        out.copy_(whole[: x.shape[0]])
        return
    for rows, results in zip(x.split(chunk), out.split(chunk), strict=True):
        torch.mm(rows, weight.t(), out_dtype=torch.float32, out=results)


def _has_gemm(binding: Binding, op: Op) -> bool:
    return gemm_of(binding, op) is not None


def _has_arranged(gpu: Gpu) -> bool:
    return arranged_gemm(gpu) is not None


# `linear` over a prompt's rows
PROMPT_LINEAR = (
    Implementation("arranged", _by_arranged, _has_arranged, _has_gemm, plans=("prefill_gemm",), packs=PACKED["linear"]),
    Implementation("library", _by_library, packs=PACKED["linear"]),
)
