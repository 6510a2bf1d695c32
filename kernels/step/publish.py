"""This module launches a step's end: it stores drafts for the next step, and results in the ring that the host polls.

It has `tree_masks` and `publish` of the reference, alone or both in one launch. A publication may decide whether a loop
on the device continues.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation import draft_rows as reference
from lowlat.kernels.reference.speculation import length_probabilities, waiting
from lowlat.kernels.reference.speculation.draft_rows import check_nodes
from lowlat.kernels.reference.step.publish import publish as publish_reference
from lowlat.kernels.speculation.length_probabilities import LearningPlan, learning_plan
from lowlat.kernels.speculation.limits import SOURCES
from lowlat.kernels.speculation.waiting import KeepingPlan, keeping_plan
from lowlat.kernels.step.publish_kernel import (
    ARGUMENTS,
    NOTHING_KEPT,
    NOTHING_LEARNT,
    PublishPlan,
    publish_kernel,
)
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, among, fit, launches

__all__ = ["LoopControl", "end_step", "examples", "finish_step", "for_condition", "publish", "tree_masks"]

THREADS = 512
MAX_ROWS = 2048  # of all slots; each takes three words of shared memory


@dataclass(frozen=True)
class LoopControl:
    """The buffers that make the step the body of a WHILE node.

    condition    the node's handle
    active       [max B]  int32  the loop ends when no slot is active
    loop_budget  [1]      int64  steps left, counted down; it ends when they are spent
    stop_flag    [1]      int64  in pinned memory; it ends when this is not zero
    """

    condition: int
    active: torch.Tensor
    loop_budget: torch.Tensor
    stop_flag: torch.Tensor


def publish(*, ring_count: torch.Tensor, loop: LoopControl | None = None, **arguments: Any) -> list[KernelCall]:
    """Write one entry of the ring, then advance its head, as the reference's `publish`, with its arguments.

    ring_count  [1]  int64  updated: the entries written so far, on the device; ring_head is only written
    All ring_* except the count may be in pinned host memory. The head is released after all other writes are visible
    to the host. Time: one block; one access to memory, the stores over the bus, and a fence. Raises ShapeError.
    """
    return _calls({**arguments, "ring_count": ring_count}, loop)


@launches(reference.tree_masks)
def tree_masks(given: Given) -> list[KernelCall]:
    """`tree_masks` of the reference. Raises ShapeError for nodes and paths that do not fit."""
    return _calls(given.arrays)


def finish_step(
    *, publication: Mapping[str, torch.Tensor], loop: LoopControl | None = None, **masks: torch.Tensor
) -> list[KernelCall]:
    """Launch `tree_masks`, with its arguments in `masks`, and `publish`, as one kernel.

    publication  the arguments of `publish` by name, without the loop
    Raises ShapeError for shapes that do not fit.
    """
    return _calls({**masks, **publication}, loop)


def end_step(
    publication: Mapping[str, torch.Tensor],
    learnt: Mapping[str, Any],
    kept: Mapping[str, torch.Tensor] | None = None,
    loop: LoopControl | None = None,
) -> list[KernelCall]:
    """Launch `publish`, `learn_draft_lengths` and perhaps `keep_features` as one kernel; arguments are by name.

    kept  None: no features are kept
    Time: that of `publish`, since the others have blocks of their own. Raises ShapeError for shapes that do not fit.
    """
    keeping = NOTHING_KEPT if kept is None else keeping_plan(fit(waiting.keep_features, kept))
    if kept is not None:
        SOURCES.check("end_step: sources of features", keeping.sources)
    records = {name: value for name, value in learnt.items() if name != "extends"}
    return _calls(
        {**publication, **(kept or {}), **records},
        loop,
        learning_plan(fit(length_probabilities.learn_draft_lengths, learnt)),
        keeping,
    )


def _calls(
    arguments: Mapping[str, Any],
    loop: LoopControl | None = None,
    learning: LearningPlan = NOTHING_LEARNT,
    keeping: KeepingPlan = NOTHING_KEPT,
) -> list[KernelCall]:
    """Make the launch of `publish`, `tree_masks` or both, by the arguments that are given; others are ignored."""
    given: dict[str, Any] = {name: value for name, value in arguments.items() if name in ARGUMENTS}
    publishing, drafting, looping = "ring_tokens" in given, "draft_nodes" in given, loop is not None
    batch, rows = given["accepted_tokens" if publishing else "draft_nodes"].shape
    if drafting and not publishing:
        rows = given["topology_masks"].shape[0]
    max_batch, max_rows = given["ring_tokens"].shape[1:] if publishing else given["drafts"].shape
    if batch > max_batch or rows > max_rows or batch > THREADS or batch * rows > MAX_ROWS:
        raise ShapeError(f"{batch} slots of {rows} rows do not fit a state or a ring of {max_batch} of {max_rows}")
    plan = PublishPlan(batch, rows, 0, max_batch, max_rows, 0, looping=looping, threads=THREADS)
    plan = replace(plan, learning=learning, keeping=keeping)
    if publishing:
        plan = _publishing(plan, given)
    if drafting:
        plan = _drafting(plan, given)
    if loop is not None:
        check_shape("active", loop.active, max_batch)
        given |= {name: getattr(loop, name) for name in ("active", "loop_budget", "stop_flag", "condition")}
    grid = (plan.num_blocks, 1, 1)
    return [KernelCall(publish_kernel(plan), grid, tuple(given.get(name, 0) for name in ARGUMENTS))]


def _publishing(plan: PublishPlan, given: Mapping[str, torch.Tensor]) -> PublishPlan:
    """Add a publication to a plan. Raises ShapeError for shapes that do not fit."""
    ring, columns = fit(publish_reference, among(publish_reference, given)).sizes("R", "n")
    return replace(plan, ring=ring, columns=columns)


def _drafting(plan: PublishPlan, given: Mapping[str, torch.Tensor]) -> PublishPlan:
    """Add the drafts' masks and paths to a plan. Raises ShapeError for shapes that do not fit."""
    fit(reference.tree_masks, among(reference.tree_masks, given))
    check_shape("topology_masks", given["topology_masks"], plan.rows)
    check_shape("drafts", given["drafts"], plan.max_batch, plan.max_rows)
    nodes = check_nodes(given["draft_nodes"], plan.batch, plan.rows)
    (num_paths, width), (known_paths, known_length) = given["tree_paths"].shape[1:], given["topology_paths"].shape
    if known_paths > num_paths or known_length > width:
        raise ShapeError(f"paths of {known_paths} by {known_length} do not fit {num_paths} by {width}")
    return replace(plan, paths=num_paths, width=width, known_paths=known_paths, known_length=known_length, nodes=nodes)


def for_condition(call: KernelCall, condition: int) -> KernelCall:
    """Return the call with another node's condition as its last argument; a call without a condition is unchanged.

    condition  the node's handle, which is known only while its graph is captured
    """
    return call if call.kernel.linked else replace(call, arguments=(*call.arguments[:-1], condition))


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: the baseline, a chain, a tree, its masks alone, and a loop's body."""
    baseline, chain = PublishPlan(4, 1, 64, 4, 8, 21), PublishPlan(1, 4, 64, 4, 8, 21, 1, 8, 1, 4, nodes=4)
    tree = PublishPlan(8, 64, 64, 8, 64, 21, 42, 8, 42, 8, nodes=64)
    chosen = replace(baseline, keeping=KeepingPlan(4, 1, 64, 3, 512), learning=LearningPlan(4, 4, 7, True))
    some = replace(chain, ring=0, columns=0, nodes=8)
    plans = (baseline, chain, tree, replace(tree, ring=0, columns=0), some, replace(chain, looping=True), chosen)
    return [publish_kernel(plan) for plan in plans]
