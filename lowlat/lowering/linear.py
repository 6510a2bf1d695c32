"""This module lowers GEMMs without fusions, and narrow GEMMs with the norm of their rows.

A narrow weight has too few rows for the blocks of the decode GEMM and of prefill's GEMM. In a step the router's kernel
multiplies by it, in the launch that norms the rows; other GEMMs then read the normed rows.
"""

from collections.abc import Sequence

from lowlat.graphs.program import Op
from lowlat.kernels.elementwise.norm import rms_norm
from lowlat.kernels.gemm.decode.gemm import decode_gemm
from lowlat.kernels.gemm.prefill.narrow_gemm import narrow_gemm
from lowlat.kernels.moe.router import RouterNorm, router_logits
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call, decodes, triggers_first
from lowlat.lowering.fusion import Fusion, Run
from lowlat.lowering.implementations import Implementation, lower_by
from lowlat.lowering.prefill_gemm import PROMPT_LINEAR
from lowlat.lowering.weight_parts import PACKED

__all__ = ["LINEAR", "LINEAR_FUSIONS", "NARROW_LINEAR"]


def _decode(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of `linear` over a step's rows."""
    given, name = binding.arguments(op), op.weights["weight"]
    return decode_gemm(
        x=given["x"], weight=binding.weights.matrix(name), bias=binding.bias(op), out=given["out"],
        columns=binding.weights.runs(name), parts=binding.k_parts(op, given["x"].shape[1]), gpu=binding.gpu,
        softcap=given.get("softcap"), shares=binding.shares_rows,
    )  # fmt: skip


def _decodes(_binding: Binding, op: Op) -> bool:
    return decodes(op)


LINEAR = (
    Implementation("decode", _decode, covers=_decodes, plans=("decode_gemm",), packs=PACKED["linear"]),
    *PROMPT_LINEAR,
)


def _by_packed(binding: Binding, op: Op) -> Sequence[Call]:
    return lower_by(LINEAR, binding, op)


def _is_packed(binding: Binding, op: Op) -> bool:
    """Whether a narrow weight is packed, as quantised ones are."""
    return binding.weights.is_packed(op.weights["weight"])


def _by_router(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of a narrow GEMM by the router's kernel."""
    given = binding.arguments(op)
    return router_logits(given["x"], binding.weights.vector(op.weights["weight"]), logits=given["out"], gpu=binding.gpu)


def _by_narrow_gemm(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of a narrow GEMM over a prompt's rows; no bit depends on a rank's number of weight rows."""
    given, weight = binding.arguments(op), binding.weights.vector(op.weights["weight"])
    return narrow_gemm(given["x"], weight, out=given["out"], workspace=binding.workspace, gpu=binding.gpu)


NARROW_LINEAR = (
    Implementation("packed", _by_packed, covers=_is_packed, plans=("decode_gemm", "prefill_gemm")),
    Implementation("router", _by_router, covers=_decodes),
    Implementation("prompt", _by_narrow_gemm),
)


def _norms(run: Run, gpu: Gpu) -> bool:
    norm, narrow = run.ops
    return decodes(narrow) and norm.stage is narrow.stage and narrow.reads["x"] == norm.writes["out"]


def _normed_narrow(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower the norm of all rows, which is written, and the narrow GEMM."""
    norm, narrow = run.ops
    given, weights = binding.arguments(norm), binding.vectors(norm)
    name = narrow.weights["weight"]
    if binding.weights.is_packed(name):
        normed = rms_norm(**given, **weights, triggers_first=triggers_first(norm))
        return [*normed, *lower_by(LINEAR, binding, narrow)]
    own = RouterNorm(weights["weight"], given["eps"], given["out"], given.get("row_live"))
    product = binding.buffers[narrow.writes["out"]]
    return router_logits(given["x"], binding.weights.vector(name), norm=own, logits=product, gpu=binding.gpu)


LINEAR_FUSIONS = (Fusion("norm+narrow gemm", "rms_norm narrow_linear", 1, _normed_narrow, _norms),)
