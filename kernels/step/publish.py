"""The end of a step in one launch: the drafts go to the next step, what the host must know into the ring that it polls.

`publish` writes the ring alone; `finish_step` does the reference's `tree_masks`, and on request the last level's
`assign_drafts`, before it. Either may decide whether a loop on the device goes on. It knows no request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.publish import RECORD_WIDTH
from lowlat.kernels.step.publish_kernel import NUM_ARGUMENTS, PublishPlan, publish_kernel
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall

__all__ = ["LoopControl", "examples", "finish_step", "for_condition", "publish"]

THREADS = 512
MAX_ROWS = 2048  # of all slots: three words of shared memory each


@dataclass(frozen=True)
class LoopControl:
    """What makes the step the body of a WHILE node.

    condition    the node's handle
    active       [max B]  int32  the loop ends when no slot is active
    loop_budget  [1]      int64  steps left, counted down; it ends when they are spent
    stop_flag    [1]      int64  in pinned memory; it ends when this is not zero
    """

    condition: int
    active: torch.Tensor
    loop_budget: torch.Tensor
    stop_flag: torch.Tensor


def publish(
    slots: torch.Tensor,
    commit_lens: torch.Tensor,
    accepted_lens: torch.Tensor,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    finish: torch.Tensor,
    num_verified: torch.Tensor,
    verified_depth: torch.Tensor,
    lengths: torch.Tensor,
    logprob_values: torch.Tensor,
    logprob_ids: torch.Tensor,
    *,
    ring_count: torch.Tensor,
    ring_records: torch.Tensor,
    ring_tokens: torch.Tensor,
    ring_logprob_values: torch.Tensor,
    ring_logprob_ids: torch.Tensor,
    ring_head: torch.Tensor,
    loop: LoopControl | None = None,
) -> list[KernelCall]:
    """Write one entry of the ring, then advance its head, as the reference's `publish`, whose arguments these are.

    ring_count  [1]  int64  updated: the entries written so far, on the device; ring_head is only written
    ring_* but the count may lie in pinned host memory; the head is released after all else is visible to the host.
    Time: one block; one trip to memory, the stores over the bus, and a fence. Raises ShapeError.
    """
    (batch, rows), columns = accepted_tokens.shape, logprob_values.shape[-1]
    ring, max_batch, max_rows = ring_tokens.shape
    for array in (slots, commit_lens, accepted_lens, finish, num_verified, verified_depth):
        check_shape("what there is one of for each entry", array, batch)
    for array in (logprob_values, logprob_ids):
        check_shape("logprob_values and logprob_ids", array, batch, rows, columns)
    for array in (ring_logprob_values, ring_logprob_ids):
        check_shape("ring_logprob_*", array, ring, max_batch, max_rows, columns)
    check_shape("ring_records", ring_records, ring, max_batch, RECORD_WIDTH)
    check_shape("accepted_nodes", accepted_nodes, batch, rows)
    if batch > max_batch or rows > max_rows or batch > THREADS or batch * rows > MAX_ROWS:
        raise ShapeError(f"an entry of {batch} slots of {rows} rows does not fit the ring's {max_batch} of {max_rows}")
    plan = PublishPlan(batch, rows, ring, max_batch, max_rows, columns, looping=loop is not None, threads=THREADS)
    reads = (slots, commit_lens, accepted_lens, accepted_tokens, accepted_nodes, finish, num_verified, verified_depth)
    rings = (ring_records, ring_tokens, ring_logprob_values, ring_logprob_ids, ring_head)
    control: tuple[Argument, ...] = (0, 0, 0, 0)
    if loop is not None:
        check_shape("active", loop.active, max_batch)
        control = (loop.active, loop.loop_budget, loop.stop_flag, loop.condition)
    first = (*reads, lengths, logprob_values, logprob_ids, ring_count, *rings)
    nothing = [0] * (NUM_ARGUMENTS - len(first) - len(control))
    return [KernelCall(publish_kernel(plan), (1, 1, 1), (*first, *nothing, *control))]


def finish_step(
    draft_nodes: torch.Tensor,
    draft_live: torch.Tensor,
    topology_masks: torch.Tensor,
    topology_paths: torch.Tensor,
    *,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    tree_masks: torch.Tensor,
    tree_paths: torch.Tensor,
    publication: Mapping[str, torch.Tensor],
    loop: LoopControl | None = None,
    assignment: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> list[KernelCall]:
    """`tree_masks` of the reference, whose arguments these are, and `publish` in one launch.

    publication  the arguments of `publish` by name, but the loop
    assignment   top_tokens, children, child_rows, child_ranks: `assign_drafts` into draft_nodes is done first
    Raises ShapeError for shapes that do not fit.
    """
    (call,) = publish(**publication, loop=loop)
    (batch, rows), (max_batch, max_rows) = draft_nodes.shape, drafts.shape
    check_shape("draft_live", draft_live, batch)
    check_shape("topology_masks", topology_masks, rows)
    check_shape("num_drafts", num_drafts, max_batch)
    check_shape("tree_masks", tree_masks, max_batch, max_rows)
    check_shape("ring_tokens", publication["ring_tokens"], publication["ring_tokens"].shape[0], max_batch, max_rows)
    check_shape("accepted_tokens", publication["accepted_tokens"], batch, rows)
    (num_paths, width), (known_paths, known_width) = tree_paths.shape[1:], topology_paths.shape
    if known_paths > num_paths or known_width > width:
        raise ShapeError(f"paths of {known_paths} by {known_width} do not fit {num_paths} by {width}")
    plan = PublishPlan(
        *(batch, rows, publication["ring_tokens"].shape[0], max_batch, max_rows),
        *(publication["logprob_ids"].shape[-1], num_paths, width, known_paths, known_width),
        looping=loop is not None,
        threads=THREADS,
    )
    if assignment is not None:
        top_tokens, children, child_rows, child_ranks = assignment
        check_shape("child_rows", child_rows, *children.shape)
        check_shape("child_ranks", child_ranks, *children.shape)
        above, ranks = top_tokens.shape[0] // batch, top_tokens.shape[1]
        plan = replace(plan, children=children.shape[0], above=above, ranks=ranks)
    drafting = (draft_nodes, draft_live, topology_masks, topology_paths, drafts, num_drafts, tree_masks, tree_paths)
    arguments = (*call.arguments[:17], *drafting, *(assignment or (0, 0, 0, 0)), *call.arguments[-4:])
    return [KernelCall(publish_kernel(plan), (1, 1, 1), arguments)]


def for_condition(call: KernelCall, condition: int) -> KernelCall:
    """The same call deciding by another WHILE node's condition; the call itself where it does not decide.

    condition  the node's handle, which is known only while its graph is captured
    """
    if call.kernel.linked:
        return call
    return replace(call, arguments=(*call.arguments[:-1], condition))


def examples() -> list[Kernel]:
    """What CI compiles: the baseline, a chain, a tree with its assignment, and a loop's body."""
    chain = PublishPlan(1, 4, 64, 4, 8, 21, 1, 8, 1, 4)
    tree = PublishPlan(8, 64, 64, 8, 64, 21, 42, 8, 42, 8, 20, 4, 8)
    baseline = PublishPlan(4, 1, 64, 4, 8, 21)
    return [publish_kernel(plan) for plan in (baseline, chain, tree, replace(chain, looping=True))]
