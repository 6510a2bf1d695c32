"""These fusions give a decode GEMM the norm of its rows as a prologue, and the operation on its output as an epilogue.

If there are few rows, every block norms all of them for itself and holds them (`steps_to_hold`). Otherwise a launch of
its own norms them. Epilogues that need values side by side in a tile use permuted weight rows. The LM head's GEMM also
writes its partial argmax, with which sampling begins.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lowlat.kernels.elementwise.per_layer import layer_columns
from lowlat.kernels.gemm.decode.gemm import (
    GELU_GATE,
    MAX_BLOCK_ROWS,
    BlockRow,
    NormPrologue,
    PartialArgmax,
    Rotation,
    decode_gemm,
    steps_to_hold,
)
from lowlat.kernels.gemm.packing import TILE_ROWS, gate_up_permutation, rope_permutation
from lowlat.kernels.sampling.select import FINITE, INFINITY
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, BlockArgmax, Call, decodes, in_parts
from lowlat.lowering.fusion import Fusion, Run
from lowlat.lowering.row_fusions import adds_ranks, gathered

__all__ = ["GEMM_FUSIONS"]

EPILOGUES = ("silu_mul", "add", "output_gate", "per_layer_gate", "gather_ranks", "cast", "rope", "bias_rows")
ROTATED = ("positions", "cos", "sin")
WRITTEN = ("row_live", "k_cache", "v_cache", "block_table", "slots", "write_lens", "offsets", "kv_scales")


def _product(run: Run) -> str:
    return run.op("linear").writes["out"]


def _fits(run: Run, gpu: Gpu) -> bool:
    """Whether the GEMM has few rows and, with a norm before it, its blocks can hold the normed rows.

    A GEMM that sums in parts has no fused norm, activation or RoPE; one with a softcap has no epilogue operation.
    """
    norm, linear = run.find("rms_norm"), run.op("linear")
    if linear.params.get("softcap") is not None and run.ops[-1] is not linear:
        return False
    if not decodes(linear) or (in_parts(linear) and run.find("rms_norm", "silu_mul", "rope") is not None):
        return False
    if norm is None:
        return True
    rows, depth = run.shape(norm.reads["x"])
    same = linear.reads["x"] == norm.writes["out"] and norm.stage is linear.stage
    return same and steps_to_hold(rows, depth, gpu) > 0


def _reads_product(kind: str, argument: str) -> Any:
    """The precondition of an epilogue: the operation of this kind reads the GEMM's output as this argument only."""

    def applies(run: Run, gpu: Gpu) -> bool:
        reads = run.op(kind).reads
        return _fits(run, gpu) and [name for name, each in reads.items() if each == _product(run)] == [argument]

    return applies


def _normed(run: Run) -> list[str]:
    norm = run.find("rms_norm")
    return [] if norm is None else [norm.writes["out"]]


def _normed_and_product(run: Run) -> list[str]:
    return [*_normed(run), _product(run)]


def _prologue(binding: Binding, run: Run, keeps: bool = False) -> dict[str, Any]:
    """The GEMM's operands, with the norm of its rows if the run has one; keeps: other operations read its rows, too."""
    linear, norm = run.op("linear"), run.find("rms_norm")
    options: dict[str, Any] = {
        "x": binding.buffers[linear.reads["x"]],
        "weight": binding.weights.matrix(linear.weights["weight"]),
        "bias": binding.bias(linear),
        "shares": binding.shares_rows,
        "gpu": binding.gpu,
    }
    options["parts"] = binding.k_parts(linear, options["x"].shape[1])
    if norm is not None:
        given = binding.arguments(norm)
        weight = binding.weights.vector(norm.weights["weight"])
        out = given["out"] if keeps else None
        options |= {"x": given["x"], "norm": NormPrologue(weight, given["eps"], given.get("row_live"), out)}
    return options


def _with_silu(binding: Binding, run: Run) -> Sequence[Call]:
    given = binding.arguments(run.op("silu_mul"))
    options = {"activation": given.get("activation", "silu"), "row_live": given.get("row_live"), "out": given["out"]}
    return decode_gemm(**_prologue(binding, run), **options)


def _gates(run: Run, gpu: Gpu) -> bool:
    """Whether the product is the gate of rows that exist already; not if it sums in parts, which are added later."""
    return not in_parts(run.op("linear")) and _reads_product("output_gate", "gate")(run, gpu)


def _with_gate(binding: Binding, run: Run) -> Sequence[Call]:
    given = binding.arguments(run.op("output_gate"))
    operands = _prologue(binding, run) | {"gated": given["x"], "row_live": given.get("row_live")}
    return decode_gemm(**operands, out=given["out"])


def _gates_layer(run: Run, gpu: Gpu) -> bool:
    return not in_parts(run.op("linear")) and _reads_product("per_layer_gate", "gate")(run, gpu)


def _with_layer_gate(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower a product that gates one layer's slice of the per-layer inputs."""
    given = binding.arguments(run.op("per_layer_gate"))
    inputs = layer_columns(given["inputs"], given["out"].shape[1], given["layer"])
    operands = _prologue(binding, run) | {"gated": inputs, "gated_by": GELU_GATE, "row_live": given.get("row_live")}
    return decode_gemm(**operands, out=given["out"])


def _with_residual(binding: Binding, run: Run) -> Sequence[Call]:
    given = binding.arguments(run.op("add"))
    return decode_gemm(**_prologue(binding, run), residual=given["a"], out=given["out"])


def _all_reduces(run: Run, gpu: Gpu) -> bool:
    """Whether the sum over ranks is added to the residual stream, and each rank has a GPU of its own."""
    fits = not gpu.is_shared and _fits(run, gpu) and run.op("gather_ranks").reads["x"] == _product(run)
    return fits and adds_ranks(run)


def _exchanged(run: Run) -> list[str]:
    return [_product(run), *gathered(run)]


def _with_all_reduce(binding: Binding, run: Run) -> Sequence[Call]:
    given = binding.arguments(run.op("add"))
    peers = binding.peer_rows(given["out"].shape[1], "gemm")
    return decode_gemm(**_prologue(binding, run), residual=given["a"], peers=peers, out=given["out"])


def _rounded(binding: Binding, run: Run) -> Sequence[Call]:
    return decode_gemm(**_prologue(binding, run), out=binding.arguments(run.op("cast"))["out"])


def _plain(binding: Binding, run: Run, best: PartialArgmax | None = None, *, keeps: bool = False) -> Sequence[Call]:
    columns = binding.weights.runs(run.op("linear").weights["weight"])
    out, operands = binding.buffers[_product(run)], _prologue(binding, run, keeps)
    cap = binding.arguments(run.op("linear")).get("softcap")
    return decode_gemm(**operands, out=out, columns=columns, best=best, softcap=cap)


def _keeps(run: Run, gpu: Gpu) -> bool:
    """Whether the norm's rows are read again, and no epilogue and no argmax applies to the product."""
    product, following = _product(run), run.following
    taken = following is not None and following.kind in EPILOGUES and product in following.reads.values()
    return _fits(run, gpu) and not taken and _limit(run, product) is None


def _with_kept_norm(binding: Binding, run: Run) -> Sequence[Call]:
    return _plain(binding, run, keeps=True)


def _gate_up(run: Run) -> dict[str, torch.Tensor]:
    linear = run.op("linear")
    return {linear.weights["weight"]: gate_up_permutation(run.shape(_product(run))[1] // 2)}


def _rotates(run: Run, gpu: Gpu) -> bool:
    """Whether the heads are queries, keys and values, or all three, and keys and values are written after RoPE."""
    rope, write = run.op("rope"), run.find("kv_write")
    sizes = {run.shape(name)[2] for name in rope.writes.values()}
    if 2 * run.shape(rope.reads["cos"])[1] not in sizes:  # a tile holds pairs of rows, and RoPE must rotate all of them
        return False
    if not _fits(run, gpu) or rope.reads["qkv"] != _product(run) or any(size % TILE_ROWS for size in sizes):
        return False
    if write is None:
        return "k" not in rope.writes and "v" not in rope.writes
    return all(part in rope.writes and write.reads[part] == rope.writes[part] for part in ("k", "v"))


def _rotated_hides(run: Run) -> list[str]:
    rope = run.op("rope")
    return [*_normed_and_product(run), *(rope.writes[part] for part in ("k", "v") if part in rope.writes)]


def _heads(run: Run) -> dict[str, torch.Tensor]:
    rope = run.op("rope")
    shapes = {part: run.shape(name) for part, name in rope.writes.items()}
    counts = {part: shapes[part][1] if part in shapes else 0 for part in ("q", "k", "v")}
    permutation = rope_permutation(counts["q"] + counts["k"], counts["v"], _head_dim(run))
    return {run.op("linear").weights["weight"]: permutation}


def _head_dim(run: Run) -> int:
    return run.shape(next(iter(run.op("rope").writes.values())))[2]


def _rotated(binding: Binding, run: Run) -> Sequence[Call]:
    write = run.find("kv_write")
    rope, written = binding.arguments(run.op("rope")), {} if write is None else binding.arguments(write)
    rotation = Rotation(
        **{name: rope[name] for name in ROTATED}, **{name: written[name] for name in WRITTEN if name in written}
    )
    return decode_gemm(**_prologue(binding, run), out=rope.get("q"), rotation=rotation, head_dim=_head_dim(run))


def _limit(run: Run, logits: str) -> int | None:
    """The largest magnitude of a finite row, if the next operation takes the argmax of these logits; else None."""
    following = run.following
    if following is None or following.reads.get("logits") != logits:
        return None
    if following.kind == "draft_topk":
        return INFINITY if following.params["k"] == 1 else None
    return FINITE if following.kind in ("finite", "sample") else None


def _chosen_from(run: Run, gpu: Gpu) -> bool:
    return _fits(run, gpu) and not in_parts(run.op("linear")) and _limit(run, _product(run)) is not None


def _with_argmax(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower logits with the partial argmax of their rows, with which the next operation begins."""
    product = _product(run)
    limit = _limit(run, product)
    if limit is None:
        raise ValueError(f"nothing takes the argmax of {product}")
    return _plain(binding, run, best=_leave_argmax(binding, run, product, limit))


def _leave_argmax(binding: Binding, run: Run, logits: str, limit: int) -> PartialArgmax:
    """The buffer for the partial argmax, with which the operation after the run begins."""
    blocks = binding.gpu.num_multiprocessors
    pairs = binding.workspace("gemm.partial_argmax", (run.shape(logits)[0], blocks, 2), torch.int32)
    binding.block_argmax = BlockArgmax(logits, pairs, limit)
    return PartialArgmax(pairs, limit)


def _biases(run: Run, gpu: Gpu) -> bool:
    """Whether the product is the bias of a block's logits, and the block has few rows."""
    fits = run.shape(_product(run))[0] <= MAX_BLOCK_ROWS and not in_parts(run.op("linear"))
    return fits and _reads_product("bias_rows", "bias")(run, gpu)


def _with_block(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower logits of a block's row plus the bias, with their partial argmax if the next operation takes it."""
    biased = run.op("bias_rows")
    given, limit = binding.arguments(biased), _limit(run, biased.writes["out"])
    best = None if limit is None else _leave_argmax(binding, run, biased.writes["out"], limit)
    beside = BlockRow(given["logits"], given["row_live"].shape[1], given["row"])
    operands = _prologue(binding, run) | {"beside": beside}
    return decode_gemm(**operands, row_live=given["row_live"], best=best, out=given["out"])


GEMM_FUSIONS = (
    Fusion(
        "gemm+silu", "rms_norm? linear silu_mul", 1, _with_silu, _reads_product("silu_mul", "gate_up"),
        _normed_and_product, _gate_up,
    ),
    Fusion("gemm+add", "rms_norm? linear add", 1, _with_residual, _reads_product("add", "b"), _normed_and_product),
    Fusion("gemm+output_gate", "rms_norm? linear output_gate", 1, _with_gate, _gates, _normed_and_product),
    Fusion(
        "gemm+per_layer_gate", "rms_norm? linear per_layer_gate", 1, _with_layer_gate, _gates_layer, _normed_and_product
    ),
    Fusion("gemm+all_reduce", "linear gather_ranks sum_ranks add", 3, _with_all_reduce, _all_reduces, _exchanged),
    Fusion("gemm+cast", "rms_norm? linear cast", 1, _rounded, _reads_product("cast", "x"), _normed_and_product),
    Fusion("gemm+rope+kv_write", "rms_norm? linear rope kv_write?", 1, _rotated, _rotates, _rotated_hides, _heads),
    Fusion("gemm+bias_rows", "linear bias_rows", 1, _with_block, _biases, _normed_and_product),
    Fusion("gemm+argmax", "rms_norm? linear", 0, _with_argmax, _chosen_from, _normed),
    Fusion("norm+gemm", "rms_norm linear", 1, _plain, _fits, _normed),
    Fusion("norm, kept+gemm", "rms_norm linear", 1, _with_kept_norm, _keeps),
)  # fmt: skip
