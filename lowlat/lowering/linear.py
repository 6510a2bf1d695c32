"""Lowering of GEMMs by themselves, and of narrow ones with the norm of their rows.

A narrow weight has too few rows for the blocks of a decode GEMM. A step multiplies by it as by a router's weight, in
the launch that norms its rows, which other GEMMs read then.
"""

from collections.abc import Sequence

import torch

from lowlat.graphs.program import Op
from lowlat.kernels.elementwise.norm import rms_norm
from lowlat.kernels.gemm.decode.gemm import decode_gemm
from lowlat.kernels.moe.router import RouterNorm, router_logits
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call, LibraryCall, decodes
from lowlat.lowering.fusion import Fusion, Run
from lowlat.lowering.prefill_gemm import multiply_chunks, prefill_linear

__all__ = ["LINEAR_FUSIONS", "linear_alone", "narrow_alone"]


def linear_alone(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of `linear`, or of a narrow one whose weight is packed."""
    if not decodes(op):
        return prefill_linear(binding, op)
    given, name = binding.arguments(op), op.weights["weight"]
    return decode_gemm(
        x=given["x"], weight=binding.weights.matrix(name), bias=binding.bias(op), out=given["out"],
        columns=binding.weights.runs(name), parts=binding.k_parts(op, given["x"].shape[1]), gpu=binding.gpu,
        softcap=given.get("softcap"),
    )  # fmt: skip


def narrow_alone(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of `narrow_linear`.

    A plain weight is multiplied in a step as a router's is, and in prefill by the matrix library, or again as a
    router's where no bit may depend on ranks, who have some of its rows each. A quantised weight is packed.
    """
    name, given = op.weights["weight"], binding.arguments(op)
    if binding.weights.is_packed(name):
        return linear_alone(binding, op)
    weight = binding.weights.vector(name)
    if decodes(op) or binding.is_invariant:
        return router_logits(given["x"], weight, logits=given["out"], gpu=binding.gpu)
    arguments = {"x": given["x"], "weight": weight, "chunk": binding.prefill_chunk, "out": given["out"]}
    return [LibraryCall("narrow_linear", _multiply, arguments)]


def _multiply(x: torch.Tensor, *, weight: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
    multiply_chunks(x, weight, chunk, out)


def _norms(run: Run, gpu: Gpu) -> bool:
    norm, narrow = run.ops
    return decodes(narrow) and norm.stage is narrow.stage and narrow.reads["x"] == norm.writes["out"]


def _normed_narrow(binding: Binding, run: Run) -> Sequence[Call]:
    """The norm of all rows, which is kept, and the product."""
    norm, narrow = run.ops
    given, weights = binding.arguments(norm), binding.vectors(norm)
    name = narrow.weights["weight"]
    if binding.weights.is_packed(name):
        return [*rms_norm(**given, **weights), *linear_alone(binding, narrow)]
    own = RouterNorm(weights["weight"], given["eps"], given["out"], given.get("row_live"))
    product = binding.buffers[narrow.writes["out"]]
    return router_logits(given["x"], binding.weights.vector(name), norm=own, logits=product, gpu=binding.gpu)


LINEAR_FUSIONS = (Fusion("norm+narrow gemm", "rms_norm narrow_linear", 1, _normed_narrow, _norms),)
