"""Which runs of a decode step's operations become which kernels: the rules that `lowering` walks by.

Each rule starts at the operation it is named after. What is fused here, and why, is told in kernels/README.md.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from lowlat.executors.lowering.expert_rules import EXPERT_RULES
from lowlat.executors.lowering.gemm_rules import linear
from lowlat.executors.lowering.lowering import Covered, Lowering, Rule, unsupported
from lowlat.executors.lowering.step_rules import STEP_RULES
from lowlat.kernels.attention.attention import attention, choose_split, num_stages
from lowlat.kernels.rows.draft_input import concat_norms, draft_input, draft_level_input
from lowlat.kernels.rows.elementwise import add, cast, silu_mul
from lowlat.kernels.rows.embed import embed, embed_norm
from lowlat.kernels.rows.norm import add_norm, split_norms
from lowlat.kernels.rows.rotate import rotate
from lowlat.kernels.sampling.draft_topk import draft_topk
from lowlat.kernels.sampling.ngram_draft import ngram_draft
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.program.program import Stage

__all__ = ["RULES"]


def _embed(lowering: Lowering, start: int) -> Covered:
    """Embedding rows, with the norm or the head's input that takes them."""
    ops = lowering.program.ops
    op, following = ops[start], lowering.following(start)
    arguments = lowering.arguments(start)
    table = lowering.weights.table(op.weights["weight"])
    if _makes_draft_input(lowering, start):
        return _draft_input(lowering, start, stored=None)
    if following is not None and following.kind == "rms_norm" and following.reads["x"] == op.writes["out"]:
        norm = lowering.arguments(start + 1)
        calls = embed_norm(
            arguments["tokens"],
            table,
            lowering.weights.vector(following.weights["weight"]),
            norm.get("row_live"),
            out=arguments["out"],
            normed=norm["out"],
            eps=norm["eps"],
        )
        return Covered(2, calls)
    return Covered(1, embed(arguments["tokens"], table, out=arguments["out"]))


def _makes_draft_input(lowering: Lowering, embedding: int) -> bool:
    """Whether an embedding is read by the head's norms after it, and by nothing else."""
    norms = lowering.following(embedding)
    embedded = lowering.program.ops[embedding].writes["out"]
    if norms is None or norms.kind != "concat_norms" or norms.reads["embedded"] != embedded:
        return False
    return lowering.dies(embedded, embedding + 1)


def _draft_input(lowering: Lowering, embedding: int, *, stored: int | None) -> Covered:
    ops, norms = lowering.program.ops, embedding + 1
    arguments = lowering.arguments(norms)
    extra = {}
    if stored is not None:
        boundary = lowering.arguments(stored)
        names = ("positions", "block_table", "slots", "block_features", "block_size")
        extra = {name: boundary[name] for name in names}
    calls = draft_input(
        lowering.buffers[ops[embedding].reads["tokens"]],
        lowering.weights.table(ops[embedding].weights["weight"]),
        arguments["hidden"],
        row_live=arguments.get("row_live"),
        out=arguments["out"],
        normed_hidden=arguments["normed_hidden"],
        eps=arguments["eps"],
        **lowering.vectors(norms),
        **extra,
    )
    first = embedding if stored is None else stored
    return Covered(norms + 1 - first, calls, [ops[embedding].writes["out"]])


def _store_boundary(lowering: Lowering, start: int) -> Covered:
    """The features of block ends and the head's input, in one."""
    if not lowering.kinds(start, "store_boundary", "embed") or not _makes_draft_input(lowering, start + 1):
        return unsupported(lowering, start)
    return _draft_input(lowering, start + 1, stored=start)


def _gather_level(lowering: Lowering, start: int) -> Covered:
    """A deeper level's rows and the head's input made of them."""
    if not lowering.kinds(start, "gather_level", "embed") or not _makes_draft_input(lowering, start + 1):
        return unsupported(lowering, start)
    embedding = lowering.program.ops[start + 1]
    arguments = lowering.arguments(start + 2, start)
    del arguments["embedded"]
    table = lowering.weights.table(embedding.weights["weight"])
    calls = draft_level_input(**arguments, weight=table, **lowering.vectors(start + 2))
    return Covered(3, calls, [embedding.writes["out"]])


def _alone(build: Callable[..., Sequence[KernelCall]]) -> Rule:
    """The rule of an operation whose kernel takes what its reference takes, and nothing of what follows it."""
    return lambda lowering, start: Covered(1, build(**lowering.arguments(start), **lowering.vectors(start)))


def _rotate(lowering: Lowering, start: int) -> Covered:
    """Norms of heads where the model has them, rotation, and the write to the cache."""
    ops = lowering.program.ops
    rope, hidden = start, []
    options = {}
    if ops[start].kind == "qk_norm":
        rope = start + 1
        if ops[rope].kind != "rope" or not lowering.dies(ops[start].writes["out"], rope):
            return unsupported(lowering, start)
        norm = lowering.arguments(start)
        options = {"qkv": norm["qkv"], "eps": norm["eps"], "row_live": norm.get("row_live")}
        options["q_weight"] = lowering.weights.vector(ops[start].weights["q_weight"]) if norm["num_heads"] else None
        options["k_weight"] = lowering.weights.vector(ops[start].weights["k_weight"]) if norm["num_kv_heads"] else None
        hidden.append(ops[start].writes["out"])
    arguments = {**lowering.arguments(rope), **options}
    last = rope
    write = lowering.following(rope)
    if write is not None and write.kind == "kv_write" and write.reads["k"] == ops[rope].writes.get("k"):
        parts = [write.reads["k"], write.reads["v"]]
        if all(lowering.dies(part, rope + 1) for part in parts):
            last = rope + 1
            arguments.update(lowering.arguments(last))
            del arguments["k"], arguments["v"]
            hidden += parts
    return Covered(last + 1 - start, rotate(**arguments), hidden)


def _attention(lowering: Lowering, start: int) -> Covered:
    op = lowering.program.ops[start]
    arguments = lowering.arguments(start)
    sinks = lowering.weights.vector(op.weights["sinks"]) if "sinks" in op.weights else None
    max_batch, max_context = lowering.program.buffers["tokens"].shape
    calls = attention(
        **arguments,
        split=choose_split(max_batch, max_context, arguments["k_cache"].shape[1]),
        sinks=sinks,
        workspace=lowering.workspace,
        num_blocks=2 * lowering.card.num_multiprocessors,
        stages=num_stages(lowering.buffers[op.reads["q"]].shape[2], lowering.card),
        early_metadata=op.stage is Stage.BASE_DECODE_STEP,
        tail=lowering.program.buffers["row_tokens"].shape[1],  # no row has more ancestors than a slot has rows
    )
    return Covered(1, calls)


def _draft_topk(lowering: Lowering, start: int) -> Covered:
    ops = lowering.program.ops
    arguments = lowering.arguments(start)
    arguments["draft_to_target"] = lowering.weights.vector(ops[start].weights["draft_to_target"])
    arguments["best"] = lowering.best_of(start) if arguments["k"] == 1 else None
    if not lowering.kinds(start, "draft_topk", "assign_drafts"):
        return Covered(1, draft_topk(**arguments, workspace=lowering.workspace))
    children = {name: value for name, value in lowering.arguments(start + 1).items() if name != "top_tokens"}
    return Covered(2, draft_topk(**arguments, **children, workspace=lowering.workspace))


def _add(lowering: Lowering, start: int) -> Covered:
    """A sum that no product makes, with the norm that follows it."""
    ops = lowering.program.ops
    arguments = lowering.arguments(start)
    following = lowering.following(start)
    if following is None or following.kind != "rms_norm" or following.reads["x"] != ops[start].writes["out"]:
        return Covered(1, add(**arguments))
    norm = lowering.arguments(start + 1)
    calls = add_norm(
        arguments["a"],
        arguments["b"],
        lowering.weights.vector(following.weights["weight"]),
        norm.get("row_live"),
        total=arguments["out"],
        out=norm["out"],
        eps=norm["eps"],
    )
    return Covered(2, calls)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **STEP_RULES,
        **EXPERT_RULES,
        "add": _add,
        "attention": _attention,
        "cast": _alone(cast),
        "concat_norms": _alone(concat_norms),
        "draft_topk": _draft_topk,
        "embed": _embed,
        "gather_level": _gather_level,
        "linear": linear,
        "ngram_draft": _alone(ngram_draft),
        "qk_norm": _rotate,
        "rope": _rotate,
        "silu_mul": _alone(silu_mul),
        "split_norms": _alone(split_norms),
        "store_boundary": _store_boundary,
    }
)
