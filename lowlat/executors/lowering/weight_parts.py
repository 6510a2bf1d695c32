"""Which weights of a program are matrices that GEMMs read, and which make up the experts of a mixture."""

from collections.abc import Iterable

from lowlat.models.program import Op, Program

__all__ = ["EXPERT_GEMMS", "expert_parts", "experts_name", "gemm_weights"]

EXPERT_GEMMS = ("experts_gate_up", "experts_down")


def experts_name(op: Op) -> str:
    """The common name of the matrices of an experts' GEMM; their bias is a sibling of it."""
    return op.weights["bias"].removesuffix(".bias")


def expert_parts(programs: Iterable[Program]) -> dict[str, dict[str, str]]:
    """The weights that hold experts' matrices, weight or blocks and scales, by argument name, for each GEMM."""
    found: dict[str, dict[str, str]] = {}
    for program in programs:
        for op in program.ops:
            if op.kind in EXPERT_GEMMS:
                parts = {argument: weight for argument, weight in op.weights.items() if argument != "bias"}
                found.setdefault(experts_name(op), parts)
    return found


def gemm_weights(programs: Iterable[Program]) -> set[str]:
    """The weights that dense GEMMs read: they are packed."""
    return {op.weights["weight"] for program in programs for op in program.ops if op.kind == "linear"}
