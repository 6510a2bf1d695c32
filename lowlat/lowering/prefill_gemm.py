"""GEMMs of a chunk of prefill: by packed weights where the GPU has wgmma, else by torch from an unpacked matrix.

Numbers of a quantised matrix are rounded to bf16, in registers or by the launch that unpacks it; FP8 by row and NVFP4
are exact, as the scales of their rows multiply what comes out.

A row's bits depend on the row and the weight alone: in our GEMM because rows are computed independently, in torch's
because it always multiplies a whole chunk, padded where there are fewer rows.

Our GEMM reads rows that are arranged. Its fusions let the operation before it leave them so: a norm, attention, or a
GEMM of gates and ups. Else a launch arranges them. Where an operation asks for codes of rows, one more launch makes
them of the arranged rows.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch

from lowlat.errors import ConfigError
from lowlat.graphs.program import Op, Stage
from lowlat.kernels.attention.prefill.flash import has_prefill_flash
from lowlat.kernels.elementwise.arranged_norm import arranged_add_norm, arranged_rms_norm
from lowlat.kernels.elementwise.coded_norm import coded_add_norm, coded_rms_norm
from lowlat.kernels.elementwise.elementwise import silu_mul, soft_cap
from lowlat.kernels.elementwise.norm import add_norm, rms_norm
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import PackedMatrix, gate_up_permutation, unpack_rows
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.gemm.prefill.arranged import ArrangedGemm, arranged_gemm
from lowlat.kernels.gemm.prefill.coded_rows import CodedRows, code_arranged, code_rows, coded_shape
from lowlat.kernels.gemm.prefill.plan import APART_ROWS, cut_of
from lowlat.kernels.gemm.tiles import BF16_TILES
from lowlat.kernels.gemm.unpacking import unpack_weight, unpacked_shape
from lowlat.kernels.toolchain.kernel import Gpu, WorkspaceShape
from lowlat.lowering.binding import Binding, Call, LibraryCall, in_parts
from lowlat.lowering.fusion import Fusion, Run
from lowlat.lowering.implementations import Implementation, lower_by
from lowlat.lowering.prefill_attention import prefill_attention
from lowlat.lowering.row_fusions import add_normed, added_hides, added_rows
from lowlat.lowering.weight_parts import GEMMS, PACKED

__all__ = [
    "PREFILL_FUSIONS", "PROMPT_LINEAR", "activation_workspace", "codes_workspace", "gemm_workspaces", "multiply_chunks",
]  # fmt: skip

AT_ONCE = KParts(1, 1)  # all of K: where no bit may depend on ranks, who have parts of a weight's rows


def gemm_workspaces(rows: int, height: int, width: int, parts: KParts | None = None) -> list[WorkspaceShape]:
    """The workspaces of our GEMM of rows with a weight [height, width]: activations, and sums of segments of K.

    The sums cover at most APART_ROWS rows: more rows never keep segments apart.
    parts  the parts in which K is summed, if it is
    """
    segments = cut_of(height, width, parts)[0]
    partials = (segments if segments > 1 else 0, min(rows, APART_ROWS), height)
    arranged = arranged_shape(rows, width)
    return [("prefill.arranged", arranged, torch.bfloat16), ("prefill.partials", partials, torch.float32)]


def activation_workspace(rows: int, width: int) -> WorkspaceShape:
    """The workspace of an activation [M, I] between two GEMMs, arranged."""
    return "prefill.activated", arranged_shape(rows, width), torch.bfloat16


def codes_workspace(rows: int, width: int) -> WorkspaceShape:
    """The workspace of the codes of rows [M, K], and their scales."""
    return "prefill.codes", coded_shape(rows, width), torch.uint8


def _gemm_of(binding: Binding, op: Op) -> ArrangedGemm | None:
    """Our GEMM that multiplies as an operation asks, on this GPU, in the program's chunks; None where none does."""
    gemm, weight = arranged_gemm(binding.gpu), binding.weights.matrix(op.weights["weight"])
    if gemm is None or not gemm.covers(binding.prefill_chunk, weight):
        return None
    return None if _codes_rows(op) and not gemm.takes_codes(weight) else gemm


def _codes_rows(op: Op) -> bool:
    """Whether a GEMM asks for codes of its rows."""
    return op.params.get("activations") is not None


def _coded(binding: Binding, op: Op, arranged: torch.Tensor) -> tuple[Sequence[Call], torch.Tensor | CodedRows]:
    """The call that codes rows for an operation's GEMM, if it asks for codes, and what the GEMM then reads."""
    if not _codes_rows(op):
        return (), arranged
    codes = _code_memory(binding, arranged.shape[1], binding.weights.matrix(op.weights["weight"]).columns)
    return code_arranged(arranged=arranged, out=codes), codes


def _given_rows(binding: Binding, op: Op) -> tuple[Sequence[Call], torch.Tensor | CodedRows]:
    """The call that arranges an operation's rows, or codes them, and what its GEMM then reads."""
    rows = binding.arguments(op)["x"]
    if _codes_rows(op):
        codes = _code_memory(binding, *rows.shape)
        return code_rows(x=rows, out=codes), codes
    arranged = _arranged_rows(binding, op)
    return arrange(x=rows, out=arranged), arranged


def _code_memory(binding: Binding, rows: int, width: int) -> CodedRows:
    return CodedRows(binding.workspace(*codes_workspace(rows, width)), rows, width)


def _linear(binding: Binding, op: Op) -> Sequence[Call]:
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
    if _codes_rows(op):
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
    gemm, columns = _gemm_of(binding, op), binding.weights.runs(op.weights["weight"])
    if gemm is None:
        raise ValueError(f"no GEMM of ours multiplies by {op.weights['weight']}")
    calls: list[Call] = []
    parts = _parts_of(binding, op, weight)
    most = gemm.at_once(1 if parts is None else parts.count)
    for rows, results in zip(given["x"].split(most), given["out"].split(most), strict=True):
        asked = gemm_workspaces(rows.shape[0], weight.rows, weight.columns, parts)
        arranged, partials = (binding.workspace(*each) for each in asked)
        x: torch.Tensor | CodedRows = arranged
        if _codes_rows(op):
            x = _code_memory(binding, *rows.shape)
            calls += code_rows(x=rows, out=x)
        else:
            calls += arrange(x=rows, out=arranged)
        calls += gemm.multiply(
            arranged=x, weight=weight, bias=binding.bias(op), columns=columns, partials=partials, out=results,
            gpu=binding.gpu, parts=parts,
        )  # fmt: skip
    return [*calls, *_capped(binding, op)]


def _parts_of(binding: Binding, op: Op, weight: PackedMatrix) -> KParts | None:
    """The parts of K in which a GEMM sums: its operation's, or all of K at once; None: as its kernels like."""
    return binding.k_parts(op, weight.columns) or (AT_ONCE if binding.is_invariant else None)


def _is_one_gemm(rows: int, width: int, linear: Op, gpu: Gpu) -> bool:
    """Whether one GEMM of ours takes so many rows [M, K] of an operation, whatever its weight's rows are."""
    gemm = arranged_gemm(gpu)
    if gemm is None or linear.stage is not Stage.PREFILL:
        return False
    most = gemm.at_once(int(linear.params.get("num_parts") or 1))
    return rows % gemm.rows == 0 and rows <= most and width % gemm.width == 0


def _norms_for(run: Run, gpu: Gpu) -> bool:
    """Whether a GEMM reads the norm's rows, in sizes that our kernels have, and the norm reads the sum before it."""
    norm, linear = _norm_of(run), run.op("linear")
    rows, width = run.shape(norm.writes["out"])
    return (
        linear.reads["x"] == norm.writes["out"]
        and (run.find("add") is None or added_rows(_until_norm(run)) is not None)
        and all(op.stage is Stage.PREFILL for op in run.ops)
        and _is_one_gemm(rows, width, linear, gpu)
    )


def _norm_of(run: Run) -> Op:
    """The norm whose rows a GEMM reads: the last one."""
    return run.all("rms_norm")[-1]


def _until_norm(run: Run) -> Run:
    """The run's operations up to that norm."""
    return Run(run.program, run.start, run.ops.index(_norm_of(run)) + 1)


def _attends_for(run: Run, gpu: Gpu) -> bool:
    """Whether a GEMM reads the result of our own flash attention, in sizes that it takes."""
    attention, linear = run.ops
    rows, width = run.shape(attention.writes["out"])
    return (
        linear.reads["x"] == attention.writes["out"]
        and not _codes_rows(linear)
        and attention.stage is Stage.PREFILL
        and has_prefill_flash(gpu, run.shape(attention.reads["k_cache"])[-1])
        and _is_one_gemm(rows, width, linear, gpu)
    )


def _feeds(run: Run, gpu: Gpu) -> bool:
    """Whether a FFN's GEMMs and activation take each other's results, in sizes that our kernels have."""
    gate_up, silu, down = run.ops[-3:]
    rows, width = run.shape(silu.writes["out"])
    depth = run.shape(gate_up.reads["x"])[1]
    units = depth // 2 if _codes_rows(gate_up) else depth  # of which a step has 64
    return (
        silu.stage is Stage.PREFILL
        and silu.reads["gate_up"] == gate_up.writes["out"]
        and down.reads["x"] == silu.writes["out"]
        and _is_one_gemm(rows, depth, gate_up, gpu)
        and _is_one_gemm(rows, width, down, gpu)
        and _gates(2 * width, units, gpu, at_once=in_parts(down))
    )


def _gates(height: int, depth: int, gpu: Gpu, *, at_once: bool) -> bool:
    """Whether our GEMM activates gates of a weight of this shape; at_once: K may be summed in one part, too."""
    gemm = arranged_gemm(gpu)
    return gemm is not None and (gemm.gates(height, depth, None) or (at_once and gemm.gates(height, depth, AT_ONCE)))


def _norms_and_feeds(run: Run, gpu: Gpu) -> bool:
    return _norms_for(run, gpu) and _feeds(run, gpu)


def _with_codes(applies: Callable[[Run, Gpu], bool], *, coded: bool) -> Callable[[Run, Gpu], bool]:
    """The precondition, and that a FFN's GEMMs ask for codes of rows, one of them at least; or that none does."""

    def holds(run: Run, gpu: Gpu) -> bool:
        return any(map(_codes_rows, run.all("linear"))) == coded and applies(run, gpu)

    return holds


def _normed(run: Run) -> list[str]:
    added = [] if run.find("add") is None else added_hides(_until_norm(run))
    return [*added, _norm_of(run).writes["out"]]


def _attended(run: Run) -> list[str]:
    return [run.op("prefill_attention").writes["out"]]


def _fed(run: Run) -> list[str]:
    return [run.op("linear").writes["out"], run.op("silu_mul").writes["out"]]


def _normed_and_fed(run: Run) -> list[str]:
    return [*_normed(run), *_fed(run)]


def _gates_first(run: Run) -> dict[str, torch.Tensor]:
    return {run.op("linear").weights["weight"]: gate_up_permutation(run.shape(run.op("silu_mul").writes["out"])[1])}


# a norm alone and one after a sum, by what their rows are left in
NORMS: Mapping[type, tuple[Callable[..., Sequence[Call]], Callable[..., Sequence[Call]]]] = {
    type(None): (rms_norm, add_norm),
    torch.Tensor: (arranged_rms_norm, arranged_add_norm),
    CodedRows: (coded_rms_norm, coded_add_norm),
}


def _norm(binding: Binding, run: Run, left: torch.Tensor | CodedRows | None = None) -> Sequence[Call]:
    """The norm, with the residual sum before it where the run has one; its rows go arranged or coded where they are to
    be left so, else to its buffer."""
    norm, added = run.op("rms_norm"), run.find("add")
    given = {**binding.arguments(norm), **binding.vectors(norm)}
    if left is not None:
        given["out"] = left
    alone, after_sum = NORMS[type(left)]
    if added is None:
        return alone(**given)
    del given["x"]
    parts = binding.arguments(added)
    return after_sum(parts["a"], parts["b"], total=parts["out"], **given)


def _is_sandwich(run: Run) -> bool:
    """Whether what is added is normed, too, or the sum scaled."""
    return len(run.all("rms_norm")) > 1 or run.find("scale") is not None


def _normed_rows(binding: Binding, run: Run, op: Op) -> tuple[Sequence[Call], torch.Tensor | CodedRows]:
    """The run's norm, and its rows as the GEMM of an operation reads them."""
    if not _codes_rows(op):
        arranged = _arranged_rows(binding, op)
        if _is_sandwich(run):
            return add_normed(binding, _until_norm(run), arranged), arranged
        return _norm(binding, run, arranged), arranged
    if _is_sandwich(run):
        arranged = _arranged_rows(binding, op)
        coding, codes = _coded(binding, op, arranged)
        return [*add_normed(binding, _until_norm(run), arranged), *coding], codes
    coded = _code_memory(binding, *binding.buffers[op.reads["x"]].shape)
    return _norm(binding, run, coded), coded


def _plain_norm(binding: Binding, run: Run) -> Sequence[Call]:
    """The run's norm, row by row."""
    return add_normed(binding, _until_norm(run)) if _is_sandwich(run) else _norm(binding, run)


def _arranged_rows(binding: Binding, op: Op) -> torch.Tensor:
    """The workspace of a GEMM's arranged rows."""
    weight, rows = binding.weights.matrix(op.weights["weight"]), binding.buffers[op.reads["x"]].shape[0]
    return binding.workspace(*gemm_workspaces(rows, weight.rows, weight.columns)[0])


def _multiply(binding: Binding, op: Op, gemm: ArrangedGemm, x: torch.Tensor | CodedRows) -> Sequence[Call]:
    """The calls of `linear` over rows that are arranged, or coded, which one GEMM takes."""
    weight, out = binding.weights.matrix(op.weights["weight"]), binding.buffers[op.writes["out"]]
    parts = _parts_of(binding, op, weight)
    partials = binding.workspace(*gemm_workspaces(out.shape[0], weight.rows, weight.columns, parts)[1])
    product = gemm.multiply(
        arranged=x, weight=weight, bias=binding.bias(op), columns=binding.weights.runs(op.weights["weight"]),
        partials=partials, out=out, gpu=binding.gpu, parts=parts,
    )  # fmt: skip
    return [*product, *_capped(binding, op)]


def _normed_linear(binding: Binding, run: Run) -> Sequence[Call]:
    """The norm leaves its rows as the GEMM reads them."""
    linear = run.op("linear")
    gemm = _gemm_of(binding, linear)
    if gemm is None:
        return [*_plain_norm(binding, run), *_linear(binding, linear)]
    norm, x = _normed_rows(binding, run, linear)
    return [*norm, *_multiply(binding, linear, gemm, x)]


def _attended_linear(binding: Binding, run: Run) -> Sequence[Call]:
    """Attention leaves its rows as the GEMM reads them."""
    attention, linear = run.ops
    gemm = _gemm_of(binding, linear)
    if gemm is None:
        return [*prefill_attention(binding, attention), *_linear(binding, linear)]
    arranged = _arranged_rows(binding, linear)
    return [*prefill_attention(binding, attention, arranged), *_multiply(binding, linear, gemm, arranged)]


def _gated_ffn(binding: Binding, run: Run) -> Sequence[Call]:
    """Both GEMMs: the first one's epilogue leaves the activation as the second one reads it; after a norm, if any."""
    gate_up, silu, down = run.ops[-3:]
    first, second = (binding.weights.matrix(op.weights["weight"]) for op in (gate_up, down))
    activation, normed = binding.arguments(silu), run.find("rms_norm") is not None
    gemm, next_gemm = _gemm_of(binding, gate_up), _gemm_of(binding, down)
    if gemm is None:
        before = _plain_norm(binding, run) if normed else ()
        return [*before, *_linear(binding, gate_up), *silu_mul(**activation), *_linear(binding, down)]
    before, x = _normed_rows(binding, run, gate_up) if normed else _given_rows(binding, gate_up)
    if next_gemm is None:
        product = _multiply(binding, gate_up, gemm, x)
        return [*before, *product, *silu_mul(**activation), *_linear(binding, down)]
    activated = binding.workspace(*activation_workspace(activation["out"].shape[0], second.columns))
    coding, next_x = _coded(binding, down, activated)
    return [
        *before,
        *gemm.multiply_gated(
            arranged=x, weight=first, bias=binding.bias(gate_up), row_live=activation.get("row_live"),
            activation=activation.get("activation", "silu"), out=activated, gpu=binding.gpu,
            parts=_parts_of(binding, gate_up, first),
        ),
        *coding,
        *_multiply(binding, down, next_gemm, next_x),
    ]  # fmt: skip


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
        multiply_chunks(x, matrix, chunk, out)
        packed = out
    else:
        packed = torch.empty(x.shape[0], matrix.shape[0], dtype=torch.float32, device=x.device)
        multiply_chunks(x, matrix, chunk, packed)
    if scales is not None:
        packed *= scales[: weight.rows]
    if places is not None:
        torch.index_select(packed, 1, places, out=out)
    if bias is not None:
        out += bias


def multiply_chunks(x: torch.Tensor, weight: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
    """x [M, K] @ weight.T [K, N] bf16 into float32 [M, N], `chunk` rows at a time, accumulated in float32.

    The matrix library takes other ways for other shapes, and a chunk's bits must not depend on those next to it: a part
    of a chunk is padded.
    """
    short = -x.shape[0] % chunk
    if short:
        whole = torch.empty(x.shape[0] + short, weight.shape[0], dtype=torch.float32, device=x.device)
        multiply_chunks(torch.nn.functional.pad(x, (0, 0, 0, short)), weight, chunk, whole)
        out.copy_(whole[: x.shape[0]])
        return
    for rows, results in zip(x.split(chunk), out.split(chunk), strict=True):
        torch.mm(rows, weight.t(), out_dtype=torch.float32, out=results)


def _has_gemm(binding: Binding, op: Op) -> bool:
    return _gemm_of(binding, op) is not None


def _has_arranged(gpu: Gpu) -> bool:
    return arranged_gemm(gpu) is not None


# `linear` over a prompt's rows
PROMPT_LINEAR = (
    Implementation("arranged", _by_arranged, _has_arranged, _has_gemm, plans=("prefill_gemm",), packs=PACKED["linear"]),
    Implementation("library", _by_library, packs=PACKED["linear"]),
)

ADDED = ("cast? rms_norm add scale? rms_norm", "add scale rms_norm")


def _ffn_fusions(*, coded: bool) -> tuple[Fusion, ...]:
    """Fusions of FFNs; where rows are coded, a launch does so between the two GEMMs, and after a norm with a sum."""
    both, feeds = (_with_codes(applies, coded=coded) for applies in (_norms_and_feeds, _feeds))
    end, fewer = (" by codes", 1) if coded else ("", 0)
    return (
        *(
            Fusion(
                f"norm+add+gated ffn{end}", f"{added} linear silu_mul linear", 4 - 2 * fewer, _gated_ffn, both,
                _normed_and_fed, _gates_first,
            )
            for added in ADDED
        ),
        Fusion(
            f"norm+gated ffn{end}", "add? rms_norm linear silu_mul linear", 3 - fewer, _gated_ffn, both,
            _normed_and_fed, _gates_first,
        ),
        Fusion(f"gated ffn{end}", "linear silu_mul linear", 2 - fewer, _gated_ffn, feeds, _fed, _gates_first),
    )  # fmt: skip


PREFILL_FUSIONS = (
    *_ffn_fusions(coded=False),
    *_ffn_fusions(coded=True),
    *(Fusion("norm+add+prefill gemm", f"{added} linear", 2, _normed_linear, _norms_for, _normed) for added in ADDED),
    Fusion("norm+prefill gemm", "add? rms_norm linear", 1, _normed_linear, _norms_for, _normed),
    Fusion("attention+prefill gemm", "prefill_attention linear", 1, _attended_linear, _attends_for, _attended),
)
