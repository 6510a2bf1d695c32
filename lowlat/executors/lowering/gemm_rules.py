"""Rules for products: what follows them, and the norm before them, in one launch where a block holds its rows.

A product of logits that a choice follows leaves the best pairs of its rows, with which the choice begins.
"""

from dataclasses import replace
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors.lowering.lowering import Covered, Lowering
from lowlat.executors.lowering.weight_layouts import is_rotated
from lowlat.kernels.gemm.decode.gemm import NormPrologue, PartialArgmax, Rotation, decode_gemm, steps_to_hold
from lowlat.kernels.sampling.select import FINITE, INFINITY

__all__ = ["linear", "normed_linear"]


def linear(lowering: Lowering, start: int) -> Covered:
    """A product, with the activation, the residual sum or the rounding that follows it."""
    return _product(lowering, start, lowering.buffers[lowering.program.ops[start].reads["x"]])


def _norms_rows(lowering: Lowering, start: int) -> bool:
    """Whether the norm at `start` is made by the product behind it, which alone reads it."""
    op, following = lowering.program.ops[start], lowering.following(start)
    normed = op.writes["out"]
    if following is None or following.kind != "linear" or following.reads["x"] != normed:
        return False
    alone = following.stage is op.stage and lowering.dies(normed, start + 1)
    rows, depth = lowering.buffers[op.reads["x"]].shape
    return alone and steps_to_hold(rows, depth, lowering.card) > 0


def normed_linear(lowering: Lowering, start: int) -> Covered | None:
    """A norm at `start` and the product behind it, in one launch; None where that is not to be had."""
    op, arguments = lowering.program.ops[start], lowering.arguments(start)
    if not _norms_rows(lowering, start):
        return None
    norm = NormPrologue(lowering.weights.vector(op.weights["weight"]), arguments["eps"], arguments.get("row_live"))
    covered = _product(lowering, start + 1, arguments["x"], norm)
    return replace(covered, count=covered.count + 1, hidden=[op.writes["out"], *covered.hidden])


def _product(lowering: Lowering, start: int, x: torch.Tensor, norm: NormPrologue | None = None) -> Covered:
    ops = lowering.program.ops
    op = ops[start]
    product = op.writes["out"]
    options: dict[str, Any] = {
        "x": x,
        "norm": norm,
        "weight": lowering.weights.matrix(op.weights["weight"]),
        "bias": lowering.weights.bias(op.weights["bias"]) if "bias" in op.weights else None,
        "card": lowering.card,
    }
    if is_rotated(ops, start, lowering.program):
        return _rotated(lowering, start, options)
    following = lowering.following(start)
    if following is not None and product in following.reads.values() and lowering.dies(product, start + 1):
        out = lowering.buffers.get(following.writes.get("out", ""))
        if following.kind == "silu_mul":
            live = following.reads.get("row_live")
            options["row_live"] = None if live is None else lowering.buffers[live]
            return Covered(2, decode_gemm(**options, silu=True, out=out), [product])
        if following.kind == "add" and following.reads["b"] == product:
            residual = lowering.buffers[following.reads["a"]]
            return Covered(2, decode_gemm(**options, residual=residual, out=out), [product])
        if following.kind == "cast":
            return Covered(2, decode_gemm(**options, out=out), [product])
    best = _best(lowering, start)
    if best is not None:
        lowering.best[product] = best.pairs
    return Covered(1, decode_gemm(**options, out=lowering.buffers[product], best=best))


def _best(lowering: Lowering, start: int) -> PartialArgmax | None:
    """Room for the best pairs of a product's rows, if the operation behind it chooses among its columns."""
    product, following = lowering.program.ops[start].writes["out"], lowering.following(start)
    if following is None or following.reads.get("logits") != product:
        return None
    if following.kind == "draft_topk" and lowering.arguments(start + 1)["k"] > 1:
        return None
    rows, blocks = lowering.buffers[product].shape[0], lowering.card.num_multiprocessors
    pairs = lowering.workspace("linear.best", (rows, blocks, 2), torch.int32)
    return PartialArgmax(pairs, FINITE if following.kind == "finite" else INFINITY)


def _rotated(lowering: Lowering, start: int, options: dict[str, Any]) -> Covered:
    """A product of queries, keys and values, their rotation and the write to the cache."""
    ops = lowering.program.ops
    rope = ops[start + 1]
    last = start + 2 if "k" in rope.writes else start + 1
    hidden = [ops[start].writes["out"], *(rope.writes[part] for part in ("k", "v") if part in rope.writes)]
    alive = [name for name in hidden if not lowering.dies(name, last)]
    if alive:
        raise ConfigError(f"{lowering.program.name}: {alive} are read after their rotation, which no kernel covers")
    arguments = {**lowering.arguments(start + 1), **(lowering.arguments(last) if last > start + 1 else {})}
    names = (
        *("positions", "cos", "sin", "row_live", "k_cache", "v_cache"),
        *("block_table", "slots", "write_lens", "offsets"),
    )
    rotation = Rotation(**{name: arguments[name] for name in names if name in arguments})
    head_dim = lowering.program.buffers[next(iter(rope.writes.values()))].shape[2]
    calls = decode_gemm(**options, out=arguments.get("q"), rotation=rotation, head_dim=head_dim)
    return Covered(last + 1 - start, calls, hidden)
