"""This module lowers GEMMs of a chunk of prefill: to a kernel on packed weights if the GPU has wgmma, else to torch.

Values of a quantised matrix are rounded to bf16, in registers or by the launch that unpacks it. FP8 by row and NVFP4
are exact, since the scales of their rows multiply the output.

A row's bits depend only on the row and the weight. Lowlat's GEMM computes rows independently. Torch always multiplies a
whole chunk, padded if there are fewer rows.

Lowlat's GEMM reads rows in a layout called arranged. Fusions make the operation before it write this layout, see
`prefill_fusions`; otherwise a launch arranges the rows. If an operation needs e4m3 codes of its rows, one more launch
makes them from the arranged rows.
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

AT_ONCE = KParts(1, 1)  # all of K in one part, so that no bit depends on the number of ranks


def activation_workspace(rows: int, width: int) -> WorkspaceShape:
    """The arranged workspace of an activation [M, I] between two GEMMs."""
    return "prefill.activated", arranged_shape(rows, width), torch.bfloat16


def codes_workspace(rows: int, width: int) -> WorkspaceShape:
    """The workspace of the codes of rows [M, K], and their scales."""
    return "prefill.codes", coded_shape(rows, width), torch.uint8


def gemm_of(binding: Binding, op: Op) -> ArrangedGemm | None:
    """Lowlat's GEMM for an operation on this GPU, in the program's chunks; None: there is none."""
    gemm, weight = arranged_gemm(binding.gpu), binding.weights.matrix(op.weights["weight"])
    if gemm is None or not gemm.covers(binding.prefill_chunk, weight):
        return None
    return None if asks_for_codes(op) and not gemm.takes_codes(weight) else gemm


def asks_for_codes(op: Op) -> bool:
    """Whether a GEMM reads e4m3 codes of its rows."""
    return op.params.get("activations") is not None


def code_result(binding: Binding, op: Op, arranged: torch.Tensor) -> tuple[Sequence[Call], torch.Tensor | CodedRows]:
    """The call that makes codes of rows, if an operation's GEMM needs them, and the buffer that the GEMM then reads."""
    if not asks_for_codes(op):
        return (), arranged
    codes = code_memory(binding, arranged.shape[1], binding.weights.matrix(op.weights["weight"]).columns)
    return code_arranged(arranged=arranged, out=codes), codes


def given_rows(binding: Binding, op: Op) -> tuple[Sequence[Call], torch.Tensor | CodedRows]:
    """The call that arranges an operation's rows, or makes codes, and the buffer that its GEMM then reads."""
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
    """The softcap of a GEMM's output, if the operation has one."""
    given = binding.arguments(op)
    cap = given.get("softcap")
    return () if cap is None else soft_cap(given["out"], cap)


def _by_library(binding: Binding, op: Op) -> Sequence[Call]:
    """Lower to the matrix library, after a launch that unpacks the matrix."""
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
    """Elements of the largest quantised matrix that the program's GEMMs unpack; decode's LM head is not among them."""
    names = {op.weights["weight"] for op in binding.program.ops if op.kind in GEMMS and op.stage is Stage.PREFILL}
    matrices = [binding.weights.matrix(name) for name in names if binding.weights.is_packed(name)]
    return max(prod(unpacked_shape(each.rows, each.columns)) for each in matrices if each.tile_format != BF16_TILES)


def _by_arranged(binding: Binding, op: Op) -> Sequence[Call]:
    """Lower to lowlat's GEMM, after a launch that arranges the rows."""
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
    """The parts of K in which a GEMM sums: its operation's, or all of K at once; None: its kernels choose them."""
    return binding.k_parts(op, weight.columns) or (AT_ONCE if binding.is_invariant else None)


def arranged_rows(binding: Binding, op: Op) -> torch.Tensor:
    """The workspace of a GEMM's arranged rows."""
    return _arranged_memory(binding, *binding.buffers[op.reads["x"]].shape)


def _arranged_memory(binding: Binding, rows: int, width: int) -> torch.Tensor:
    """The workspace of arranged rows [M, K]."""
    return binding.workspace("prefill.arranged", arranged_shape(rows, width), torch.bfloat16)


def partial_sums(binding: Binding, op: Op, rows: int) -> torch.Tensor:
    """The workspace of the sums of segments of K of an operation's GEMM over so many rows, [S, rows, N].

    It has at most APART_ROWS rows: with more rows segments are never kept apart. For codes, K counts two columns as
    one.
    """
    weight = binding.weights.matrix(op.weights["weight"])
    width = weight.columns // 2 if asks_for_codes(op) else weight.columns
    segments = cut_of(weight.rows, width, parts_of(binding, op, weight))[0]
    shape = (segments if segments > 1 else 0, min(rows, APART_ROWS), weight.rows)
    return binding.workspace("prefill.partials", shape, torch.float32)


def multiply_arranged(binding: Binding, op: Op, gemm: ArrangedGemm, x: torch.Tensor | CodedRows) -> Sequence[Call]:
    """The calls of `linear` over arranged rows, or codes, by one GEMM."""
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

    The matrix library chooses its kernel by shape, and a chunk's bits must not depend on other chunks. So a part of a
    chunk is padded.
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
