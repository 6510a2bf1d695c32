"""Rules for the parts of a step that are neither products nor attention: slots, choice of tokens, commit, publish."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors.lowering.lowering import Covered, Lowering, Rule
from lowlat.kernels.attention.kv_compact import kv_compact
from lowlat.kernels.rows.draft_rows import gather_features, take_last
from lowlat.kernels.sampling.logprobs import logprobs
from lowlat.kernels.sampling.sample import sample
from lowlat.kernels.step.accept import accept_and_commit
from lowlat.kernels.step.begin_step import begin_step
from lowlat.kernels.step.publish import finish_step, publish

__all__ = ["RING_COUNT", "STEP_RULES"]

RING_COUNT = "publish.count"  # entries written to the ring so far, kept on the device


def _begin(lowering: Lowering, start: int) -> Covered:
    """Commands, the list of active slots and the rows to verify."""
    _expect(lowering, start, "apply_commands", "list_active_slots", "gather_rows")
    return Covered(3, begin_step(**lowering.arguments(start, start + 1, start + 2)), fence=True)


def _sample(lowering: Lowering, start: int) -> Covered:
    """Finite flags and draws."""
    _expect(lowering, start, "finite", "sample")
    best = lowering.best_of(start)
    return Covered(2, sample(**lowering.arguments(start, start + 1), best=best, workspace=lowering.workspace))


def _logprobs(lowering: Lowering, start: int) -> Covered:
    return Covered(1, logprobs(**lowering.arguments(start), workspace=lowering.workspace))


def _accept(lowering: Lowering, start: int) -> Covered:
    """Acceptance to commit, the head's rows with it; a tree's rows move afterwards, by what acceptance wrote."""
    ops = lowering.program.ops
    _expect(lowering, start, ops[start].kind, "truncate")
    at = start + 2
    compacted = []
    while ops[at].kind == "kv_compact":
        compacted.append(lowering.arguments(at))
        at += 1
    _expect(lowering, at, "commit")
    arguments = lowering.arguments(start, start + 1, at)
    if ops[at + 1].kind == "draft_rows":
        at += 1
        rows = lowering.arguments(at)
        names = ("tokens", "positions", "row_live", "write_lens", "live_positions")
        arguments["draft_rows"] = {name: rows[name] for name in names}
        arguments["dense_lens"] = rows["dense_lens"]
    calls = accept_and_commit(**arguments)
    if compacted:
        shared = ("accepted_nodes", "commit_lens", "dense_lens", "block_table", "slots")
        own: dict[str, Any] = {name: compacted[0][name] for name in shared}
        caches = {f"{part}_caches": [each[f"{part}_cache"] for each in compacted] for part in ("k", "v")}
        calls = [*calls, *kv_compact(**{**own, **caches}, workspace=lowering.workspace)]
    return Covered(at + 1 - start, calls)


def _gather_features(lowering: Lowering, start: int) -> Covered:
    return Covered(1, gather_features(**lowering.arguments(start)))


def _take_last(lowering: Lowering, start: int) -> Covered:
    """The live rows of one or two buffers."""
    count = 2 if lowering.kinds(start, "take_last", "take_last") else 1
    each = [lowering.arguments(start + number) for number in range(count)]
    pairs = [(arguments["x"], arguments["out"]) for arguments in each]
    return Covered(count, take_last(pairs, each[0]["commit_lens"]))


def _tree_masks(lowering: Lowering, start: int) -> Covered:
    """The next step's masks and paths, and the publication."""
    _expect(lowering, start, "tree_masks", "publish")
    masks = lowering.arguments(start)
    del masks["slots"]
    return Covered(2, finish_step(**masks, publication=_publication(lowering, start + 1), loop=lowering.loop))


def _publish(lowering: Lowering, start: int) -> Covered:
    return Covered(1, publish(**_publication(lowering, start), loop=lowering.loop))


def _publication(lowering: Lowering, start: int) -> dict[str, Any]:
    return {**lowering.arguments(start), "ring_count": lowering.workspace(RING_COUNT, (1,), torch.int64)}


def _expect(lowering: Lowering, start: int, *kinds: str) -> None:
    if not lowering.kinds(start, *kinds):
        found = [op.kind for op in lowering.program.ops[start : start + len(kinds)]]
        raise ConfigError(f"{lowering.program.name}: kernels cover {list(kinds)} together, the program has {found}")


STEP_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "accept": _accept,
        "accept_simulated": _accept,
        "apply_commands": _begin,
        "finite": _sample,
        "gather_features": _gather_features,
        "logprobs": _logprobs,
        "publish": _publish,
        "take_last": _take_last,
        "tree_masks": _tree_masks,
    }
)
