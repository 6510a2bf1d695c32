"""In these fusions the operation before a prompt's GEMM writes its rows in the layout that the GEMM reads.

That operation is a norm, with the residual sum before it, or attention, or an FFN's gate and up GEMM with the
activation as its epilogue. If other operations read a norm's rows, too, it writes both layouts. If a GEMM needs e4m3
codes of its rows, a norm writes codes; after another operation a launch makes them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from lowlat.graphs.program import Op, Stage
from lowlat.kernels.attention.prefill.flash import has_prefill_flash
from lowlat.kernels.elementwise.arranged_norm import arranged_add_norm, arranged_rms_norm
from lowlat.kernels.elementwise.coded_norm import coded_add_norm, coded_rms_norm
from lowlat.kernels.elementwise.elementwise import silu_mul
from lowlat.kernels.elementwise.norm import add_norm, rms_norm
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.gemm.prefill.arranged import arranged_gemm
from lowlat.kernels.gemm.prefill.coded_rows import CodedRows
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call
from lowlat.lowering.fusion import Fusion, Run
from lowlat.lowering.implementations import lower_by
from lowlat.lowering.linear import NARROW_LINEAR
from lowlat.lowering.prefill_attention import prefill_attention
from lowlat.lowering.prefill_gemm import (
    activation_workspace,
    arranged_rows,
    asks_for_codes,
    code_memory,
    code_result,
    gemm_of,
    given_rows,
    multiply_arranged,
    multiply_prompt,
    partial_sums,
    parts_of,
)
from lowlat.lowering.row_fusions import add_normed, added_hides, added_rows

__all__ = ["PREFILL_FUSIONS"]


def _is_one_gemm(rows: int, width: int, linear: Op, gpu: Gpu) -> bool:
    """Whether one GEMM of ours takes so many rows [M, K] of an operation, whatever its weight's rows are."""
    gemm = arranged_gemm(gpu)
    if gemm is None or linear.stage is not Stage.PREFILL:
        return False
    most = gemm.at_once(_num_parts(linear))
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


def _norms_for_several(run: Run, gpu: Gpu) -> bool:
    """Whether a GEMM reads rows, not their codes, of a norm that others read, too: a narrow GEMM before it, or later
    operations. A FFN's first GEMM is left to the fusion that activates."""
    linear, narrow = run.op("linear"), run.find("narrow_linear")
    return (
        not asks_for_codes(linear)
        and (narrow is None or narrow.reads["x"] == linear.reads["x"])
        and (run.following is None or run.following.kind != "silu_mul")
        and _norms_for(run, gpu)
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
        and not asks_for_codes(linear)
        and attention.stage is Stage.PREFILL
        and has_prefill_flash(gpu, run.shape(attention.reads["k_cache"])[-1])
        and _is_one_gemm(rows, width, linear, gpu)
    )


def _feeds(run: Run, gpu: Gpu) -> bool:
    """Whether a FFN's GEMMs and activation take each other's results, in sizes that our kernels have."""
    gate_up, silu, down = run.ops[-3:]
    rows, width = run.shape(silu.writes["out"])
    return (
        silu.stage is Stage.PREFILL
        and silu.reads["gate_up"] == gate_up.writes["out"]
        and down.reads["x"] == silu.writes["out"]
        and _is_one_gemm(rows, run.shape(gate_up.reads["x"])[1], gate_up, gpu)
        and _is_one_gemm(rows, width, down, gpu)
        and _gates(2 * width, gate_up, gpu)
    )


def _gates(height: int, linear: Op, gpu: Gpu) -> bool:
    """Whether our GEMM activates gates of an operation's weight, of so many rows."""
    gemm = arranged_gemm(gpu)
    return gemm is not None and gemm.gates(height, _num_parts(linear))


def _num_parts(linear: Op) -> int:
    """The parts in which an operation sums K."""
    return int(linear.params.get("num_parts") or 1)


def _norms_and_feeds(run: Run, gpu: Gpu) -> bool:
    return _norms_for(run, gpu) and _feeds(run, gpu)


def _with_codes(applies: Callable[[Run, Gpu], bool], *, coded: bool) -> Callable[[Run, Gpu], bool]:
    """The precondition, and that a FFN's GEMMs ask for codes of rows, one of them at least; or that none does."""

    def holds(run: Run, gpu: Gpu) -> bool:
        return any(map(asks_for_codes, run.all("linear"))) == coded and applies(run, gpu)

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


def _norm(
    binding: Binding, run: Run, left: torch.Tensor | CodedRows | None = None, *, keeps: bool = False
) -> Sequence[Call]:
    """The norm, with the residual sum before it where the run has one; its rows go arranged or coded where they are to
    be left so, else to its buffer. keeps: arranged ones go there, too."""
    norm, added = run.op("rms_norm"), run.find("add")
    given = {**binding.arguments(norm), **binding.vectors(norm)}
    if keeps:
        given["kept"] = given["out"]
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
    if not asks_for_codes(op):
        arranged = arranged_rows(binding, op)
        if _is_sandwich(run):
            return add_normed(binding, _until_norm(run), arranged), arranged
        return _norm(binding, run, arranged), arranged
    if _is_sandwich(run):
        arranged = arranged_rows(binding, op)
        coding, codes = code_result(binding, op, arranged)
        return [*add_normed(binding, _until_norm(run), arranged), *coding], codes
    coded = code_memory(binding, *binding.buffers[op.reads["x"]].shape)
    return _norm(binding, run, coded), coded


def _plain_norm(binding: Binding, run: Run) -> Sequence[Call]:
    """The run's norm, row by row."""
    return add_normed(binding, _until_norm(run)) if _is_sandwich(run) else _norm(binding, run)


def _normed_linear(binding: Binding, run: Run) -> Sequence[Call]:
    """The norm leaves its rows as the GEMM reads them."""
    linear = run.op("linear")
    gemm = gemm_of(binding, linear)
    if gemm is None:
        return [*_plain_norm(binding, run), *multiply_prompt(binding, linear)]
    norm, x = _normed_rows(binding, run, linear)
    return [*norm, *multiply_arranged(binding, linear, gemm, x)]


def _normed_for_several(binding: Binding, run: Run) -> Sequence[Call]:
    """The norm leaves its rows as the GEMM reads them, and as a narrow GEMM before it or later operations do."""
    linear, narrow = run.op("linear"), run.all("narrow_linear")
    gemm = gemm_of(binding, linear)
    if gemm is None:
        before = [call for op in narrow for call in lower_by(NARROW_LINEAR, binding, op)]
        return [*_norm(binding, run), *before, *multiply_prompt(binding, linear)]
    arranged = arranged_rows(binding, linear)
    before = [call for op in narrow for call in _narrow_product(binding, op, arranged)]
    norm = _norm(binding, run, arranged, keeps=True)
    return [*norm, *before, *multiply_arranged(binding, linear, gemm, arranged)]


def _narrow_product(binding: Binding, op: Op, arranged: torch.Tensor) -> Sequence[Call]:
    """The calls of a narrow GEMM: by a packed weight, as a quantised one is, ours of the same arranged rows."""
    gemm = gemm_of(binding, op) if binding.weights.is_packed(op.weights["weight"]) else None
    if gemm is None:
        return lower_by(NARROW_LINEAR, binding, op)
    return multiply_arranged(binding, op, gemm, arranged)


def _attended_linear(binding: Binding, run: Run) -> Sequence[Call]:
    """Attention leaves its rows as the GEMM reads them."""
    attention, linear = run.ops
    gemm = gemm_of(binding, linear)
    if gemm is None:
        return [*prefill_attention(binding, attention), *multiply_prompt(binding, linear)]
    arranged = arranged_rows(binding, linear)
    return [*prefill_attention(binding, attention, arranged), *multiply_arranged(binding, linear, gemm, arranged)]


def _gated_ffn(binding: Binding, run: Run) -> Sequence[Call]:
    """Both GEMMs: the first one's epilogue leaves the activation as the second one reads it; after a norm, if any."""
    gate_up, silu, down = run.ops[-3:]
    first, second = (binding.weights.matrix(op.weights["weight"]) for op in (gate_up, down))
    activation, normed = binding.arguments(silu), run.find("rms_norm") is not None
    gemm, next_gemm = gemm_of(binding, gate_up), gemm_of(binding, down)
    if gemm is None:
        before = _plain_norm(binding, run) if normed else ()
        return [*before, *multiply_prompt(binding, gate_up), *silu_mul(**activation), *multiply_prompt(binding, down)]
    before, x = _normed_rows(binding, run, gate_up) if normed else given_rows(binding, gate_up)
    if next_gemm is None:
        product = multiply_arranged(binding, gate_up, gemm, x)
        return [*before, *product, *silu_mul(**activation), *multiply_prompt(binding, down)]
    activated = binding.workspace(*activation_workspace(activation["out"].shape[0], second.columns))
    coding, next_x = code_result(binding, down, activated)
    return [
        *before,
        *gemm.multiply_gated(
            arranged=x, weight=first, bias=binding.bias(gate_up), row_live=activation.get("row_live"),
            partials=partial_sums(binding, gate_up, activated.shape[1]), out=activated,
            activation=activation.get("activation", "silu"), gpu=binding.gpu,
            parts=parts_of(binding, gate_up, first),
        ),
        *coding,
        *multiply_arranged(binding, down, next_gemm, next_x),
    ]  # fmt: skip


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
    Fusion(
        "norm, kept+prefill gemm", "add? rms_norm narrow_linear? linear", 1, _normed_for_several, _norms_for_several
    ),
    Fusion("attention+prefill gemm", "prefill_attention linear", 1, _attended_linear, _attends_for, _attended),
)
