"""Which way prefill takes through experts, and how much room it wants for that beside its scratch. It knows no kernel.

Chunks of few rows take the step's products, which read packed matrices, once for each 64 rows; larger ones expand
matrices, some at a time, for products of torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowlat.executors.orders import EXPERT_PRODUCTS
from lowlat.program import Program, Stage

__all__ = ["Expansion", "expanded_size", "has_few_rows", "room_bytes"]

FEW_ROWS = 384  # README.md of the kernels reckons where expanding costs less
WORKSPACE_BYTES = 256 << 20  # eight matrices of gpt-oss-120b's gate_up
INPUTS = {"experts_gate_up": "x", "experts_down": "activated"}


@dataclass(frozen=True)
class Expansion:
    """Room for the experts of one product that are expanded together.

    count     experts
    elements  of the largest product's `count` matrices; bf16
    """

    count: int
    elements: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the room."""
        return 2 * self.elements


def expanded_size(program: Program, weight: Callable[[str], torch.Tensor]) -> Expansion:
    """The room that a prefill program wants; none for a program without experts, or that is no prefill.

    weight  a weight by its canonical name; only the biases of experts' products are asked for, [E, N]
    """
    shapes = []
    for op in program.ops:
        if op.kind in EXPERT_PRODUCTS and op.stage is Stage.PREFILL:
            num_experts, rows = weight(op.weights["bias"]).shape
            shapes.append((num_experts, rows * program.buffers[op.reads[INPUTS[op.kind]]].shape[-1]))
    if not shapes:
        return Expansion(0, 0)
    num_experts, largest = max(count for count, _ in shapes), max(size for _, size in shapes)
    count = min(num_experts, max(1, WORKSPACE_BYTES // (2 * largest)))
    return Expansion(count, count * largest)


def has_few_rows(program: Program) -> bool:
    """Whether a prefill program's experts are left to the step's products."""
    rows = [program.buffers[op.reads["expert_ids"]].shape[0] for op in program.ops if op.kind in EXPERT_PRODUCTS]
    return max(rows, default=0) <= FEW_ROWS


def room_bytes(program: Program, weight: Callable[[str], torch.Tensor]) -> int:
    """Bytes that a prefill program's experts want on a card: of expanded matrices, or of a chunk's products by rank.

    weight  as `expanded_size` takes it
    """
    if not has_few_rows(program):
        return expanded_size(program, weight).num_bytes
    sizes = [0]
    for op in program.ops:
        if op.kind == "experts_down" and op.stage is Stage.PREFILL:
            rows, ranks = program.buffers[op.reads["expert_ids"]].shape
            sizes.append(4 * rows * ranks * program.buffers[op.writes["out"]].shape[-1])
    return max(sizes)
