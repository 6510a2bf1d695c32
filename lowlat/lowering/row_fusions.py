"""These fusions cover row-wise operations: embeddings, residual sums, norms, RoPE, and a draft model's input."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lowlat.graphs.program import Op
from lowlat.kernels.collectives.all_reduce import all_reduce, all_reduce_add, all_reduce_add_norm
from lowlat.kernels.collectives.shares import share_add, share_add_norm
from lowlat.kernels.elementwise.embed import embed_norm
from lowlat.kernels.elementwise.norm import add_norm, two_norms
from lowlat.kernels.elementwise.norm_add import norm_add
from lowlat.kernels.elementwise.rotate import LayerKV, rotate, rotate_layers
from lowlat.kernels.gemm.decode.gemm import steps_to_hold
from lowlat.kernels.speculation.draft_block import BlockBoundary, block_input, mask_input
from lowlat.kernels.speculation.draft_input import ChainDrafts, draft_input, draft_level_input
from lowlat.kernels.speculation.draft_rows import take_blocks, take_last
from lowlat.kernels.speculation.markov import parent_vectors
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call, decodes, triggers_first
from lowlat.lowering.fusion import Fusion, Run

__all__ = [
    "ROW_FUSIONS",
    "add_normed",
    "added_hides",
    "added_rows",
    "adds_ranks",
    "embedded",
    "embeds_for_norms",
    "gathered",
    "is_unscaled",
    "level_input",
]

KV_WRITES = ("kv_write", "prefill_kv_write")


def _normed(binding: Binding, run: Run) -> dict[str, Any]:
    norm = run.op("rms_norm")
    given = binding.arguments(norm)
    return {
        "norm_weight": binding.weights.vector(norm.weights["weight"]),
        "row_live": given.get("row_live"),
        "normed": given["out"],
        "eps": given["eps"],
    }


def _norms_result(run: Run, gpu: Gpu) -> bool:
    return run.op("rms_norm").reads["x"] == run.ops[0].writes["out"]


def _embed_norm(binding: Binding, run: Run) -> Sequence[Call]:
    op = run.op("embed")
    given = binding.arguments(op)
    table, scale = binding.weights.table(op.weights["weight"]), given.get("scale")
    return embed_norm(given["tokens"], table, **_normed(binding, run), out=given["out"], scale=scale)


def is_unscaled(run: Run) -> bool:
    """Whether embedded rows are taken as they are: launches that do more than embed and norm have no scale."""
    return run.op("embed").params.get("scale") is None


def _embeds_block(run: Run, gpu: Gpu) -> bool:
    """Whether the norm is of the block's embedded rows, all of which that are live."""
    if not is_unscaled(run):
        return False
    made, embed, norm = run.op("mask_rows").writes, run.op("embed"), run.op("rms_norm")
    read = (embed.reads["tokens"], norm.reads["x"], norm.reads.get("row_live"))
    return read == (made["tokens"], embed.writes["out"], made["row_live"])


def _mask_input(binding: Binding, run: Run) -> Sequence[Call]:
    embed, norm = run.op("embed"), _normed(binding, run)
    del norm["row_live"]
    table, out = binding.weights.table(embed.weights["weight"]), binding.buffers[embed.writes["out"]]
    return mask_input(**binding.arguments(run.op("mask_rows")), **norm, weight=table, out=out)


def _add_norm(binding: Binding, run: Run) -> Sequence[Call]:
    given, norm = binding.arguments(run.op("add")), _normed(binding, run)
    return add_norm(
        given["a"], given["b"], norm["norm_weight"], norm["row_live"], total=given["out"], out=norm["normed"],
        eps=norm["eps"],
    )  # fmt: skip


def _norms_both(run: Run, gpu: Gpu) -> bool:
    """Whether two norms of a step do not read each other's rows, and the second is not left to what comes after it."""
    first, second = run.ops
    same = first.params["eps"] == second.params["eps"] and first.stage is second.stage
    same = same and first.reads.get("row_live") == second.reads.get("row_live")
    apart = {first.writes["out"], second.writes["out"]}.isdisjoint((first.reads["x"], second.reads["x"]))
    taken = run.following is not None and second.writes["out"] in run.following.reads.values()
    sizes = [run.shape(op.reads["x"]) for op in run.ops]
    return decodes(first) and same and apart and not taken and sizes[0] == sizes[1]


def _two_norms(binding: Binding, run: Run) -> Sequence[Call]:
    first, second = (binding.arguments(op) for op in run.ops)
    weights = tuple(binding.vectors(op)["weight"] for op in run.ops)
    return two_norms(
        (first["x"], second["x"]), (weights[0], weights[1]), first.get("row_live"), outs=(first["out"], second["out"]),
        eps=first["eps"], triggers_first=triggers_first(run.ops[0]),
    )  # fmt: skip


def added_rows(run: Run) -> tuple[str, str] | None:
    """The summand of a run's residual sum, as it comes to the norm before it or to the sum, and the stream that it is
    added to; None unless each operation of the run reads what those before it made.

    The run is of `cast`, `rms_norm`, `add`, `scale` and `rms_norm`, of which all but the sum may be absent.
    """
    rounded, added, scaled = run.find("cast"), run.op("add"), run.find("scale")
    place = run.ops.index(added)
    first = next((op for op in run.ops[:place] if op.kind == "rms_norm"), None)
    following = next((op for op in run.ops[place:] if op.kind == "rms_norm"), None)
    total = added if scaled is None else scaled
    if scaled is not None and scaled.reads["x"] != added.writes["out"]:
        return None
    if following is not None and following.reads["x"] != total.writes["out"]:
        return None
    if first is None:
        return added.reads["b"], added.reads["a"]
    if rounded is not None and first.reads["x"] != rounded.writes["out"]:
        return None
    if following is not None and following.reads.get("row_live") != first.reads.get("row_live"):
        return None
    normed, pair = first.writes["out"], (added.reads["a"], added.reads["b"])
    others = [name for name in pair if name != normed]
    if len(others) != 1 or run.program.buffers[others[0]].dtype != torch.bfloat16:
        return None
    return (first if rounded is None else rounded).reads["x"], others[0]


def _adds_normed(run: Run, gpu: Gpu) -> bool:
    return added_rows(run) is not None


def added_hides(run: Run) -> list[str]:
    """The buffers that a launch keeps to itself: what is rounded, its norm, and the sum before it is scaled."""
    place = run.ops.index(run.op("add"))
    hidden = [op.writes["out"] for op in run.ops[:place]]
    return [*hidden, run.op("add").writes["out"]] if run.find("scale") is not None else hidden


def add_normed(binding: Binding, run: Run, arranged: torch.Tensor | None = None) -> Sequence[Call]:
    """Norm, sum, scale and norm, as far as the run has them.

    arranged  where the last norm goes as a prefill GEMM reads it; None: it goes row by row to its buffer
    """
    rows = added_rows(run)
    if rows is None:
        raise ValueError("the run's operations do not read each other's results")
    added, scaled = run.op("add"), run.find("scale")
    place = run.ops.index(added)
    first = next((op for op in run.ops[:place] if op.kind == "rms_norm"), None)
    following = next((op for op in run.ops[place:] if op.kind == "rms_norm"), None)
    given: dict[str, Any] = {"weight": None, "total": binding.buffers[(scaled or added).writes["out"]]}
    for op, names in ((first, ("weight", "eps")), (following, ("next_weight", "next_eps"))):
        if op is not None:
            own = binding.arguments(op)
            given |= {names[0]: binding.vectors(op)["weight"], names[1]: own["eps"], "row_live": own.get("row_live")}
    if following is not None:
        given["out"] = binding.buffers[following.writes["out"]] if arranged is None else arranged
    if scaled is not None:
        given["scalar"] = binding.vectors(scaled)["scalar"]
    x, residual = (binding.buffers[name] for name in rows)
    return norm_add(
        x, residual=residual, arranged=arranged is not None, triggers_first=triggers_first(added), **given
    )  # fmt: skip


def _two_sums(run: Run) -> tuple[Run, Run]:
    """The first norm and sum, with the norm of that sum; and the sum that this is added by, with what follows it."""
    count = run.ops.index(run.op("add")) + 2
    return Run(run.program, run.start, count), Run(run.program, run.start + count, run.count - count)


def _sums_twice(run: Run, gpu: Gpu) -> bool:
    """Whether in a step a sum's norm is added to the residual stream, and all norms have the same dead rows."""
    head, tail = _two_sums(run)
    rows, normed = added_rows(tail), head.ops[-1].writes["out"]
    if not decodes(run.ops[0]) or added_rows(head) is None or rows is None or rows.count(normed) != 1:
        return False
    stream = rows[rows[0] == normed]
    norms = run.all("rms_norm")
    alike = all(norm.reads.get("row_live") == norms[0].reads.get("row_live") for norm in norms)
    return alike and run.program.buffers[stream].dtype == torch.bfloat16


def _hides_sums(run: Run) -> list[str]:
    head, tail = _two_sums(run)
    return [*(op.writes["out"] for op in head.ops), *added_hides(tail)]


def _add_twice(binding: Binding, run: Run) -> Sequence[Call]:
    head, tail = _two_sums(run)
    first, rows = added_rows(head), added_rows(tail)
    if first is None or rows is None:
        raise ValueError("the run's operations do not read each other's results")
    norm, between = head.all("rms_norm")
    scaled, following = tail.find("scale"), tail.find("rms_norm")
    stream = rows[rows[0] == between.writes["out"]]
    given: dict[str, Any] = {"total": binding.buffers[(scaled or tail.op("add")).writes["out"]]}
    for op, names in ((norm, ("weight", "eps")), (between, ("sum_weight", "sum_eps"))):
        given |= {names[0]: binding.vectors(op)["weight"], names[1]: binding.arguments(op)["eps"]}
    if following is not None:
        own = binding.arguments(following)
        given |= {"next_weight": binding.vectors(following)["weight"], "next_eps": own["eps"], "out": own["out"]}
    if scaled is not None:
        given["scalar"] = binding.vectors(scaled)["scalar"]
    x, residual = (binding.buffers[name] for name in first)
    live = binding.arguments(norm).get("row_live")
    return norm_add(
        x, residual=residual, row_live=live, stream=binding.buffers[stream], triggers_first=triggers_first(norm),
        **given,
    )  # fmt: skip


def adds_ranks(run: Run) -> bool:
    """Whether whole rows of several ranks are summed, and the sum, if added at all, added to the residual stream."""
    gather, total, added = run.op("gather_ranks"), run.op("sum_ranks"), run.find("add")
    ranks, _, width = run.shape(gather.writes["out"])
    return (
        ranks > 1
        and run.shape(gather.reads["x"])[1] == width
        and total.reads["parts"] == gather.writes["out"]
        and (added is None or (added.reads["b"] == total.writes["out"] != added.reads["a"]))
    )


def _sums_ranks(run: Run, gpu: Gpu) -> bool:
    """Whether they are, and where there is a norm, it is of the residual stream."""
    added, norm = run.find("add"), run.find("rms_norm")
    return adds_ranks(run) and (norm is None or (added is not None and norm.reads["x"] == added.writes["out"]))


def _norms_ranks(run: Run, gpu: Gpu) -> bool:
    """Whether the norm is left to the all-reduce: GEMMs of a step norm few rows for themselves."""
    norm = run.op("rms_norm")
    rows, depth = run.shape(norm.reads["x"])
    return _sums_ranks(run, gpu) and not (decodes(norm) and steps_to_hold(rows, depth, gpu) > 0)


def gathered(run: Run) -> list[str]:
    """Buffers that an all-reduce keeps to itself: the parts, and their sum where it is added to the residual stream."""
    hidden = [run.op("gather_ranks").writes["out"]]
    return hidden if run.find("add") is None else [*hidden, run.op("sum_ranks").writes["out"]]


def _all_reduce(binding: Binding, run: Run) -> Sequence[Call]:
    """Ranks' parts added up as they come; with the residual stream and its norm where those follow.

    Of prefill's many rows each rank adds up a share.
    """
    x, added = binding.buffers[run.op("gather_ranks").reads["x"]], run.find("add")
    width, has_norm, memory = x.shape[1], run.find("rms_norm") is not None, dict[str, Any]()
    add: Callable[..., Sequence[Call]] = all_reduce_add
    add_and_norm: Callable[..., Sequence[Call]] = all_reduce_add_norm
    if added is not None and not decodes(added) and not binding.gpu.is_shared:
        memory["shares"] = binding.row_shares(width)
        add, add_and_norm = share_add, share_add_norm
    else:
        memory["channel"] = binding.channel(width, whole=has_norm)
    if added is None:
        return all_reduce(x, **memory, out=binding.buffers[run.op("sum_ranks").writes["out"]])
    given = binding.arguments(added)
    if not has_norm:
        return add(x, given["a"], **memory, total=given["out"])
    norm = _normed(binding, run)
    return add_and_norm(
        x, given["a"], norm["norm_weight"], norm["row_live"], **memory, total=given["out"], out=norm["normed"],
        eps=norm["eps"],
    )  # fmt: skip


def embeds_for_norms(run: Run, gpu: Gpu) -> bool:
    """Whether the draft model's two norms read this embedding and, where rows are gathered, what was gathered."""
    embed, norms, level = run.op("embed"), run.op("concat_norms"), run.find("gather_level")
    if norms.reads["embedded"] != embed.writes["out"] or not is_unscaled(run):
        return False
    if level is None:
        return True
    gathered = level.writes
    same = embed.reads["tokens"] == gathered["tokens"] and norms.reads["hidden"] == gathered["hidden"]
    return same and norms.reads.get("row_live") == gathered["row_live"]


def embedded(run: Run) -> list[str]:
    """The embedding, which a launch that norms it keeps to itself."""
    return [run.op("embed").writes["out"]]


def _stores_hidden(run: Run, gpu: Gpu) -> bool:
    stored, norms = run.op("store_boundary"), run.op("concat_norms")
    same = all(stored.reads[name] == norms.reads.get(name) for name in ("hidden", "row_live"))
    return same and embeds_for_norms(run, gpu)


def _draft_input(binding: Binding, run: Run) -> Sequence[Call]:
    """The draft model's input; with the features at block ends where they are stored."""
    embed, norms, stored = run.op("embed"), run.op("concat_norms"), run.find("store_boundary")
    given, extra = binding.arguments(norms), dict[str, Any]()
    if stored is not None:
        boundary = binding.arguments(stored)
        names = ("positions", "block_table", "slots", "block_features", "block_size")
        extra = {name: boundary[name] for name in names}
    del given["embedded"]
    return draft_input(
        binding.buffers[embed.reads["tokens"]], binding.weights.table(embed.weights["weight"]), **given,
        **binding.vectors(norms), **extra,
    )  # fmt: skip


def _lays_out(run: Run, gpu: Gpu) -> bool:
    """Whether the draft model's norms read the block's rows, and what is stored are features of its committed ones."""
    made, embed, norms = run.op("block_rows").writes, run.op("embed"), run.op("concat_norms")
    read = (embed.reads["tokens"], norms.reads["hidden"], norms.reads.get("row_live"), norms.reads["embedded"])
    if read != (made["block_tokens"], made["out"], made["block_live"], embed.writes["out"]) or not is_unscaled(run):
        return False
    stored = run.find("store_boundary")
    if stored is None:
        return True
    same = stored.reads["hidden"] == run.op("block_rows").reads["hidden"]
    return same and run.shape(stored.reads["positions"])[1] <= run.shape(made["block_live"])[1]


def _block_input(binding: Binding, run: Run) -> Sequence[Call]:
    """A block's rows, the draft model's input made of them, and the features at block ends where they are stored."""
    rows, norms, stored, boundary = run.op("block_rows"), run.op("concat_norms"), run.find("store_boundary"), None
    given, normed = binding.arguments(rows), binding.arguments(norms)
    given["block_hidden"] = given.pop("out")
    given |= {name: normed[name] for name in ("out", "normed_hidden", "eps")}
    if stored is not None:
        kept = binding.arguments(stored)
        del kept["hidden"]
        boundary = BlockBoundary(**kept)
    table = binding.weights.table(run.op("embed").weights["weight"])
    return block_input(
        **given, **binding.vectors(rows), **binding.vectors(norms), weight=table, boundary=boundary
    )  # fmt: skip


def level_input(binding: Binding, run: Run, drafts: ChainDrafts | None = None) -> Sequence[Call]:
    """A deeper level's rows, and the draft model's input made of them; before them the drafts that they take."""
    embed, norms = run.op("embed"), run.op("concat_norms")
    normed = binding.arguments(norms)
    outs = {name: normed[name] for name in ("out", "normed_hidden", "eps")}
    table = binding.weights.table(embed.weights["weight"])
    return draft_level_input(
        **binding.arguments(run.op("gather_level")), **outs, weight=table, **binding.vectors(norms), drafts=drafts
    )


def _embeds_parents(run: Run, gpu: Gpu) -> bool:
    return is_unscaled(run) and run.op("embed").reads["tokens"] == run.op("parent_tokens").writes["parents"]


def _parent_vectors(binding: Binding, run: Run) -> Sequence[Call]:
    embed = run.op("embed")
    table = binding.weights.table(embed.weights["weight"])
    vectors = binding.buffers[embed.writes["out"]]
    return parent_vectors(**binding.arguments(run.op("parent_tokens")), weight=table, vectors=vectors)


def _rotates(run: Run, gpu: Gpu) -> bool:
    """Whether each operation reads those before it, and the heads are rotated as they come from their norms.

    Dead rows are the same to norm and write; in a chunk of prefill to the write alone.
    """
    norm, rope, write = run.find("qk_norm"), run.op("rope"), run.find(*KV_WRITES)
    if norm is not None and rope.reads["qkv"] != norm.writes["out"]:
        return False
    if norm is not None and write is not None:
        live = None if write.kind == "prefill_kv_write" else write.reads["row_live"]
        if norm.reads.get("row_live") != live:
            return False
    return write is None or all(write.reads[part] == rope.writes.get(part) for part in ("k", "v"))


def _rotated(run: Run) -> list[str]:
    norm, write = run.find("qk_norm"), run.find(*KV_WRITES)
    normed = [] if norm is None else [norm.writes["out"]]
    return normed if write is None else [*normed, write.reads["k"], write.reads["v"]]


def _head_weights(binding: Binding, norm: Op) -> dict[str, torch.Tensor | None]:
    """The weights of the heads' norms, for those of queries and keys that a GEMM's output has."""
    counts = {"q_weight": norm.params["num_heads"], "k_weight": norm.params["num_kv_heads"]}
    vectors = binding.vectors(norm)
    return {name: vectors[name] if count else None for name, count in counts.items()}


def _rotate(binding: Binding, run: Run) -> Sequence[Call]:
    norm, rope, write = run.find("qk_norm"), run.op("rope"), run.find(*KV_WRITES)
    given = binding.arguments(rope)
    if norm is not None:
        heads = binding.arguments(norm)
        weights = _head_weights(binding, norm)
        given |= {"qkv": heads["qkv"], "eps": heads["eps"], "row_live": heads.get("row_live"), **weights}
        given |= {name: heads[name] for name in ("v_norm", "keys_as_values") if name in heads}
    if write is not None:
        written = binding.arguments(write)
        given |= {name: written[name] for name in written if name not in ("k", "v")}
        del given["k"], given["v"]
    return rotate(**given, triggers_first=triggers_first(rope))


class _Layer(NamedTuple):
    """The operations on a layer's columns."""

    taken: Op
    norm: Op | None
    rope: Op
    write: Op


def _layers(run: Run) -> list[_Layer]:
    """The operations of each layer; none where a layer lacks one, or they come in another order."""
    kinds = ["kv_write" if op.kind in KV_WRITES else op.kind for op in run.ops]
    each = ["take_columns", *(["qk_norm"] if "qk_norm" in kinds else []), "rope", "kv_write"]
    count, rest = divmod(len(kinds), len(each))
    if rest or kinds != each * count:
        return []
    groups = (run.ops[first : first + len(each)] for first in range(0, len(kinds), len(each)))
    return [_Layer(ops[0], ops[1] if len(ops) == 4 else None, ops[-2], ops[-1]) for ops in groups]


def _rotates_layers(run: Run, gpu: Gpu) -> bool:
    """Whether these are the keys and values of layers whose columns stand side by side, each rotated as if alone."""
    layers, start, width = _layers(run), run.start, 0
    for layer in layers:
        norm, product = layer.norm, layer.taken.writes["out"]
        if layer.taken.params["first"] != width or (norm or layer.rope).reads["qkv"] != product:
            return False
        alone = Run(run.program, start + 1, 2 if norm is None else 3)
        if "q" in layer.rope.writes or not _rotates(alone, gpu):
            return False
        start, width = alone.start + alone.count, width + run.shape(product)[1]
    return bool(layers) and run.shape(layers[0].taken.reads["x"])[1] == width and _are_alike(run, layers)


def _are_alike(run: Run, layers: Sequence[_Layer]) -> bool:
    """Whether layers differ in their weights, in their caches and the scales of these, and in nothing else."""
    own, found = ("qkv", "k", "v", "kv_scales"), list[Any]()
    for layer in layers:
        ops = [op for op in layer[1:] if op is not None]
        reads = [{name: None if name in own else buffer for name, buffer in op.reads.items()} for op in ops]
        shapes = [run.shape(name) for name in (layer.taken.writes["out"], *layer.write.writes.values())]
        found.append((layer.taken.reads, [(op.kind, op.params) for op in ops], reads, shapes))
    return all(each == found[0] for each in found)


def _layers_hide(run: Run) -> list[str]:
    written = (name for op in run.ops if op.kind not in KV_WRITES for name in op.writes.values())
    return list(dict.fromkeys(written))


def _rotate_layers(binding: Binding, run: Run) -> Sequence[Call]:
    layers, made = _layers(run), list[LayerKV]()
    for layer in layers:
        written = binding.arguments(layer.write)
        weight = None if layer.norm is None else _head_weights(binding, layer.norm)["k_weight"]
        made.append(LayerKV(written["k_cache"], written["v_cache"], weight, written.get("kv_scales")))
    first = layers[0]
    rope, written = binding.arguments(first.rope), binding.arguments(first.write)
    given = {name: rope[name] for name in ("positions", "cos", "sin")}
    given |= {name: written[name] for name in written if name not in (*first.write.writes, "k", "v", "kv_scales")}
    normed = {} if first.norm is None else binding.arguments(first.norm)
    given |= {name: normed[name] for name in ("eps", "v_norm", "keys_as_values") if name in normed}
    return rotate_layers(binding.buffers[first.taken.reads["x"]], **given, layers=made, workspace=binding.workspace)


def _same_lengths(run: Run, gpu: Gpu) -> bool:
    return len({op.reads["commit_lens"] for op in run.ops}) == 1


def _take_both(binding: Binding, run: Run) -> Sequence[Call]:
    each = [binding.arguments(op) for op in run.ops]
    take = take_last if run.ops[0].kind == "take_last" else take_blocks
    return take([(given["x"], given["out"]) for given in each], each[0]["commit_lens"])


def _same_rows(run: Run, gpu: Gpu) -> bool:
    """Whether as many rows are taken of as many."""
    counts = {(run.shape(op.reads["x"])[0], run.shape(op.writes["out"])[0]) for op in run.ops}
    return len(counts) == 1 and _same_lengths(run, gpu)


ROW_FUSIONS = (
    Fusion(
        "store_boundary+draft_input", "store_boundary embed concat_norms", 2, _draft_input, _stores_hidden, embedded
    ),
    Fusion("block+draft_input", "store_boundary? block_rows embed concat_norms", 2, _block_input, _lays_out, embedded),
    Fusion("level+draft_input", "gather_level embed concat_norms", 2, level_input, embeds_for_norms, embedded),
    Fusion("all_reduce+norm", "gather_ranks sum_ranks add rms_norm", 3, _all_reduce, _norms_ranks, gathered),
    Fusion("all_reduce", "gather_ranks sum_ranks add?", 1, _all_reduce, _sums_ranks, gathered),
    Fusion("draft_input", "embed concat_norms", 1, _draft_input, embeds_for_norms, embedded),
    Fusion("parents+embed", "parent_tokens embed", 1, _parent_vectors, _embeds_parents),
    Fusion("mask_rows+embed+norm", "mask_rows embed rms_norm", 2, _mask_input, _embeds_block),
    Fusion("embed+norm", "embed rms_norm", 1, _embed_norm, _norms_result),
    Fusion(
        "norm+add twice", "cast? rms_norm add rms_norm add scale? rms_norm?", 3, _add_twice, _sums_twice, _hides_sums
    ),
    Fusion("norm+add", "cast? rms_norm add scale? rms_norm?", 1, add_normed, _adds_normed, added_hides),
    Fusion("add+scale", "add scale rms_norm?", 1, add_normed, _adds_normed, added_hides),
    Fusion("add+norm", "add rms_norm", 1, _add_norm, _norms_result),
    Fusion("norm+norm", "rms_norm rms_norm", 1, _two_norms, _norms_both),
    Fusion(
        "layers+rope", f"take_columns take_columns|qk_norm|rope|{'|'.join(KV_WRITES)}*", 2, _rotate_layers,
        _rotates_layers, _layers_hide,
    ),
    Fusion("qk_norm+rope", f"qk_norm rope {'|'.join(KV_WRITES)}?", 1, _rotate, _rotates, _rotated),
    Fusion("rope+kv_write", f"rope {'|'.join(KV_WRITES)}", 1, _rotate, _rotates, _rotated),
    Fusion("take_last", "take_last take_last", 1, _take_both, _same_lengths),
    Fusion("take_block", "take_block take_block", 1, _take_both, _same_rows),
)  # fmt: skip
