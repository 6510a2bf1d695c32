"""These fusions cover a step's operations outside of models: its start, sampling, acceptance to commit, its end."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowlat.graphs.program import Op
from lowlat.kernels.attention.kv_compact import kv_compact
from lowlat.kernels.sampling.argmax import NextLevel
from lowlat.kernels.sampling.sample import sample
from lowlat.kernels.speculation.accept import accept_and_commit
from lowlat.kernels.speculation.draft_input import ChainDrafts
from lowlat.kernels.speculation.limits import MAX_SOURCES
from lowlat.kernels.speculation.waiting import draft_waiting_rows
from lowlat.kernels.step.begin_step import Choice, begin_step
from lowlat.kernels.step.publish import end_step, finish_step
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call
from lowlat.lowering.fusion import Fusion, Run
from lowlat.lowering.operations import block_argmax_of, draft_topk_alone, publication
from lowlat.lowering.row_fusions import embedded, embeds_for_norms, is_unscaled, level_input

__all__ = ["STEP_FUSIONS"]

DRAFT_ROWS = ("tokens", "positions", "row_live", "write_lens", "live_positions")
OPENING = "apply_commands list_active_slots choose_draft_length gather_rows publish_rows"
LEVEL = "draft_topk assign_drafts gather_level embed concat_norms"
COMPACTED = ("accepted_nodes", "commit_lens", "dense_lens", "block_table", "slots")


def _joined(binding: Binding, ops: Sequence[Op]) -> dict[str, Any]:
    """The joined arguments of operations that fulfil `_agree`."""
    return {name: value for op in ops for name, value in binding.arguments(op).items()}


def _agree(*kinds: str) -> Any:
    """The precondition that arguments of one name are the same buffer in all operations of these kinds."""

    def applies(run: Run, gpu: Gpu) -> bool:
        known: dict[str, str] = {}
        ops = [op for op in run.ops if not kinds or op.kind in kinds]
        named = [item for op in ops for item in ({**op.reads, **op.writes}).items()]
        return all(known.setdefault(name, buffer) == buffer for name, buffer in named)

    return applies


def _begin(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower a step's start: commands, the list of active slots, the rows to verify, and their publication; before the
    rows the choice of the draft length, or the storing of drafts."""
    kinds = ("apply_commands", "list_active_slots", "publish_rows", "tree_masks")
    applies, lists, tells, hands = (run.find(kind) is not None for kind in kinds)
    given, chosen = _joined(binding, run.ops), run.find("choose_draft_length")
    choice = None
    if chosen is not None:
        choice = Choice(given.pop("row"), given.pop("most_waiting"), 0 if binding.switches else None)
    most = given.pop("most_drafts", 0)
    return begin_step(given, applies=applies, lists=lists, tells=tells, hands=hands, choice=choice, most_drafts=most)


def _begins(run: Run, gpu: Gpu) -> bool:
    """Whether there is more than one operation, and all fulfil `_agree`."""
    return len(run.ops) > 1 and _agree()(run, gpu)


def _accept(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower acceptance to commit, with the draft model's rows; a later launch moves a tree's accepted KV."""
    chain = [op for op in run.ops if op.kind not in ("kv_compact", "draft_rows")]
    arguments = _joined(binding, chain)
    rows = run.find("draft_rows")
    if rows is not None:
        given = binding.arguments(rows)
        arguments |= {"draft_rows": {name: given[name] for name in DRAFT_ROWS}, "dense_lens": given["dense_lens"]}
    calls = list(accept_and_commit(**arguments))
    return [*calls, *_compacted(binding, run)] if run.find("kv_compact") else calls


def _accepts(run: Run, gpu: Gpu) -> bool:
    rows, commit = run.find("draft_rows"), run.op("commit")
    known = {**commit.reads, **commit.writes}
    linked = rows is None or all(
        rows.reads[name] == known[name] for name in ("accepted_tokens", "commit_lens", "draft_live")
    )
    return linked and _agree("accept", "accept_simulated", "truncate", "commit")(run, gpu) and _compacts(run, gpu)


def _compacts(run: Run, gpu: Gpu) -> bool:
    compacted = run.all("kv_compact")
    shared = [name for name in COMPACTED if name != "block_table"]  # layers of a window have a table of their own
    return all(len({op.reads[name] for op in compacted}) <= 1 for name in shared)


def _compacted(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower to one launch for all layers of one block table whose caches have the same shape."""
    layers: dict[tuple[str, torch.Size], list[dict[str, Any]]] = {}
    for op in run.all("kv_compact"):
        given = binding.arguments(op)
        layers.setdefault((op.reads["block_table"], given["k_cache"].shape), []).append(given)
    calls = list[Call]()
    for (table, shape), each in layers.items():
        shared: dict[str, Any] = {name: each[0][name] for name in COMPACTED}
        caches: dict[str, Any] = {f"{part}_caches": [given[f"{part}_cache"] for given in each] for part in ("k", "v")}
        calls += kv_compact(**shared, **caches, workspace=binding.workspace, group=f"{table}.{tuple(shape)}")
    return calls


def _sample(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower finite flags and draws."""
    best = block_argmax_of(binding, run.op("finite"))
    return sample(**_joined(binding, run.ops), best=best, workspace=binding.workspace)


def _draft_topk(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower each row's likeliest ids, and the drafts that take them."""
    children = {name: each for name, each in binding.arguments(run.op("assign_drafts")).items() if name != "top_tokens"}
    return draft_topk_alone(binding, run.op("draft_topk"), **children)


def _assigns(run: Run, gpu: Gpu) -> bool:
    drafting, assigning = run.ops
    return assigning.reads["top_tokens"] == drafting.writes["out"]


def _draft_next(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower a chain's drafts, and the tokens and vectors of the next level."""
    children = {name: each for name, each in binding.arguments(run.op("assign_drafts")).items() if name != "top_tokens"}
    embed = run.op("embed")
    given, table = binding.arguments(run.op("parent_tokens")), binding.weights.table(embed.weights["weight"])
    level = {name: given[name] for name in ("tokens", "parents", "row_live")}
    then = NextLevel(**level, weight=table, vectors=binding.buffers[embed.writes["out"]])
    return draft_topk_alone(binding, run.op("draft_topk"), **children, then=then)


def _follows(run: Run, gpu: Gpu) -> bool:
    """Whether each slot has one draft, which is the next level's only parent."""
    drafting, assigning, parents, embed = run.ops
    return (
        _is_only_parent(run, drafting, assigning, parents.reads["nodes"])
        and run.shape(parents.writes["parents"]) == (run.shape(assigning.writes["draft_nodes"])[0], 1)
        and parents.reads.get("draft_nodes") == assigning.writes["draft_nodes"]
        and embed.reads["tokens"] == parents.writes["parents"]
        and is_unscaled(run)
    )


def _draft_level(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower a chain's drafts and the draft model's input for the next level; with a partial argmax in one launch."""
    drafting = run.op("draft_topk")
    best, given = block_argmax_of(binding, drafting), binding.arguments(drafting)
    if best is None:
        return [*_draft_topk(binding, run), *level_input(binding, run)]
    names = binding.vectors(drafting)["draft_to_target"]
    return level_input(binding, run, ChainDrafts(best, given.get("row_live"), names, given["out"].reshape(-1)))


def _feeds_level(run: Run, gpu: Gpu) -> bool:
    """Whether each slot has one draft, which is the only parent of the level with this input."""
    drafting, assigning, level = run.op("draft_topk"), run.op("assign_drafts"), run.op("gather_level")
    return (
        _is_only_parent(run, drafting, assigning, level.reads["nodes"])
        and run.shape(level.writes["tokens"]) == (run.shape(assigning.writes["draft_nodes"])[0], 1)
        and level.reads["draft_nodes"] == assigning.writes["draft_nodes"]
        and embeds_for_norms(run, gpu)
    )


def _is_only_parent(run: Run, drafting: Op, assigning: Op, parents: str) -> bool:
    """Whether each slot has one draft, and it is the one node of `parents`."""
    slots, constants = run.shape(assigning.writes["draft_nodes"])[0], run.program.constants
    children, nodes = constants.get(assigning.reads["children"]), constants.get(parents)
    return (
        children is not None
        and nodes is not None
        and torch.equal(children, nodes)
        and run.shape(drafting.writes["out"]) == (slots, 1)
        and assigning.reads["top_tokens"] == drafting.writes["out"]
    )


def _ends(run: Run, gpu: Gpu) -> bool:
    """Whether the operations fulfil `_agree`, and one launch supports this number of feature sources."""
    kept, agreed = run.find("keep_features"), _agree()(run, gpu)
    return bool(agreed) and (kept is None or f"source{MAX_SOURCES}" not in kept.reads)


def _end(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower the publication, the copy of features that wait, and the counting of accepted drafts."""
    kept = run.find("keep_features")
    return end_step(
        publication(binding, run.op("publish")),
        binding.arguments(run.op("learn_draft_lengths")),
        None if kept is None else binding.arguments(kept),
        binding.loop,
    )


def _waits(run: Run, gpu: Gpu) -> bool:
    """Whether features and the draft model's rows belong to the waiting positions."""
    waiting, rows, taken = run.op("waiting_rows"), run.op("draft_rows"), run.find("take_features")
    outs = waiting.writes
    names = {"accepted_tokens": "waiting_tokens", "commit_lens": "counts", "dense_lens": "firsts"}
    same = all(rows.reads[name] == outs[own] for name, own in {**names, "draft_live": "draft_live"}.items())
    if taken is None:
        return same
    known = {**waiting.reads, **outs}
    return same and all(taken.reads[name] == known[name] for name in ("slots", "firsts", "counts"))


def _draft_waiting(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower the waiting positions, their features, and the draft model's rows over them."""
    given, taken = binding.arguments(run.op("draft_rows")), run.find("take_features")
    features = None
    if taken is not None:
        own = binding.arguments(taken)
        features = {name: own[name] for name in ("waiting_features", "out")}
    rows = {name: given[name] for name in DRAFT_ROWS}
    return draft_waiting_rows(**binding.arguments(run.op("waiting_rows")), features=features, rows=rows)


def _finish(binding: Binding, run: Run) -> Sequence[Call]:
    """Lower the next step's masks and paths, and the publication."""
    masks: Mapping[str, Any] = binding.arguments(run.op("tree_masks"))
    own = {name: value for name, value in masks.items() if name != "slots"}
    return finish_step(**own, publication=publication(binding, run.op("publish")), loop=binding.loop)


STEP_FUSIONS = (
    Fusion("open_step", OPENING, 1, _begin, _begins),
    Fusion("hand_over+begin_step", "tree_masks gather_rows publish_rows?", 1, _begin, _begins),
    Fusion("begin_step", "apply_commands? list_active_slots? gather_rows publish_rows?", 1, _begin, _begins),
    Fusion("accept+commit", "accept|accept_simulated truncate kv_compact* commit draft_rows?", 2, _accept, _accepts),
    Fusion("sample", "finite sample", 1, _sample, _agree()),
    Fusion("kv_compact", "kv_compact kv_compact kv_compact*", 1, _compacted, _compacts),
    Fusion("draft_topk+parents", "draft_topk assign_drafts parent_tokens embed", 3, _draft_next, _follows),
    Fusion("draft_topk+level", LEVEL, 4, _draft_level, _feeds_level, embedded),
    Fusion("draft_topk", "draft_topk assign_drafts", 1, _draft_topk, _assigns),
    Fusion("end_step", "publish keep_features? learn_draft_lengths", 1, _end, _ends),
    Fusion("waiting_rows", "waiting_rows take_features? draft_rows", 1, _draft_waiting, _waits),
    Fusion("finish_step", "tree_masks publish", 1, _finish, _agree("tree_masks", "publish")),
)
