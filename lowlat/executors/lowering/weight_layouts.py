"""In which order the rows of packed weights lie, so that a product's epilogue finds what belongs together in one tile;
and which weights make up the matrices of a mixture's experts."""

from collections.abc import Iterable

import torch

from lowlat.kernels.gemm.packing import TILE_ROWS, gate_up_permutation, rope_permutation
from lowlat.program.program import Op, Program

__all__ = ["EXPERT_PRODUCTS", "expert_parts", "experts_name", "is_rotated", "weight_permutations"]

EXPERT_PRODUCTS = ("experts_gate_up", "experts_down")


def is_rotated(ops: tuple[Op, ...], start: int, program: Program) -> bool:
    """Whether the product at `start` is of queries, keys and values that are rotated, and written, right behind it.

    Queries alone, keys and values alone, or all three; no norm of the heads in between; a head size of whole tiles.
    """
    if start + 1 >= len(ops) or ops[start + 1].kind != "rope":
        return False
    rope = ops[start + 1]
    sizes = {program.buffers[name].shape[2] for name in rope.writes.values()}
    if rope.reads["qkv"] != ops[start].writes["out"] or any(size % TILE_ROWS for size in sizes):
        return False
    if "k" not in rope.writes:
        return "v" not in rope.writes
    write = ops[start + 2] if start + 2 < len(ops) else None
    return write is not None and write.kind == "kv_write" and write.reads["k"] == rope.writes["k"]


def experts_name(op: Op) -> str:
    """What the matrices of an experts' product are called together: their bias is a sibling of this name."""
    return op.weights["bias"].removesuffix(".bias")


def expert_parts(programs: Iterable[Program]) -> dict[str, dict[str, str]]:
    """The weights that hold experts' matrices, weight or blocks and scales, by argument name, for each product."""
    found: dict[str, dict[str, str]] = {}
    for program in programs:
        for op in program.ops:
            if op.kind in EXPERT_PRODUCTS:
                parts = {argument: weight for argument, weight in op.weights.items() if argument != "bias"}
                found.setdefault(experts_name(op), parts)
    return found


def weight_permutations(programs: Iterable[Program]) -> dict[str, torch.Tensor]:
    """Orders by weight name, or by the name of an experts' product, for the programs of a step."""
    orders: dict[str, torch.Tensor] = {}
    for program in programs:
        for start, op in enumerate(program.ops):
            if op.kind == "experts_gate_up" and experts_name(op) not in orders:
                orders[experts_name(op)] = gate_up_permutation(program.buffers[op.writes["out"]].shape[2])
            if op.kind != "linear" or op.weights["weight"] in orders:
                continue
            following = program.ops[start + 1] if start + 1 < len(program.ops) else None
            if following is not None and following.kind == "silu_mul":
                width = program.buffers[op.writes["out"]].shape[1] // 2
                orders[op.weights["weight"]] = gate_up_permutation(width)
            elif is_rotated(program.ops, start, program):
                orders[op.weights["weight"]] = _heads_order(program, program.ops[start + 1])
    return orders


def _heads_order(program: Program, rope: Op) -> torch.Tensor:
    shapes = {part: program.buffers[name].shape for part, name in rope.writes.items()}
    counts = {part: shapes[part][1] if part in shapes else 0 for part in ("q", "k", "v")}
    head_dim = next(iter(shapes.values()))[2]
    return rope_permutation(counts["q"] + counts["k"], counts["v"], head_dim)
