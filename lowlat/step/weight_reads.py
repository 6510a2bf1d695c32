"""This module counts the bytes of weights that an operation of a step must read."""

from collections.abc import Mapping

from lowlat.graphs.program import Op

__all__ = ["EXPERT_OPS", "weight_bytes"]

EXPERT_OPS = ("experts_gate_up", "experts_down")
# operations that read some rows of a table
FEW_ROWS = ("embed", "draft_topk", "draft_topk_logprobs", "walk_candidates")


def weight_bytes(op: Op, sizes: Mapping[str, int], experts_share: float) -> float:
    """Bytes of the weights that an operation reads.

    sizes          bytes of weights by the names that operations use; a quantised matrix has the sum of its parts
    experts_share  the share of a layer's experts that rows choose
    """
    if op.kind in FEW_ROWS:
        return 0.0
    share = experts_share if op.kind in EXPERT_OPS else 1.0
    return share * sum(sizes.get(name, 0) for name in op.weights.values())
