"""How much room prefill wants for experts' matrices that are expanded together. It knows no kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowlat.executors.orders import EXPERT_PRODUCTS
from lowlat.program import Program, Stage

__all__ = ["Expansion", "expanded_size"]

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
