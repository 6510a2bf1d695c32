"""Acceptance and commit in one launch, a block a slot: the reference's `accept`, `truncate`, `commit`, `draft_rows`.

The parts can be had apart: acceptance with truncation, and commit with the head's rows. A tree's rows may be compacted
after all of it: compaction reads nothing that a commit changes. It knows no model and no sampler.
"""

from dataclasses import replace

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.step.accept_kernel import MAX_PATHS, MAX_ROWS, NUM_ARGUMENTS, AcceptPlan, accept_kernel
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall

__all__ = ["accept", "accept_and_commit", "commit", "examples"]


def accept(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    slots: torch.Tensor,
    finite: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    stop_ids: torch.Tensor,
    *,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    best_path: torch.Tensor,
    commit_lens: torch.Tensor,
    finish: torch.Tensor,
    mean_length: float | None = None,
    seed: int = 0,
) -> list[KernelCall]:
    """`accept`, or with a mean length `accept_simulated`, then `truncate`, whose arguments these are.

    A path's pads come last. Time: one block a slot, two trips to memory. Raises ShapeError for shapes that do not fit.
    """
    (batch, rows), (num_paths, width) = target_tokens.shape, paths.shape[1:]
    for array in (draft_tokens, finite, accepted_tokens, accepted_nodes):
        check_shape("draft_tokens, finite and accepted_*", array, batch, rows)
    for array in (slots, accepted_lens, best_path, commit_lens, finish):
        check_shape("slots, *_lens, best_path and finish", array, batch)
    plan = _plan(rows, num_paths, width, stop_ids.shape[1], accepts=True, mean_length=mean_length, seed=seed)
    reads = (target_tokens, draft_tokens, paths, finite, slots, lengths, slot_ints, stop_ids, 0)
    writes = (accepted_tokens, accepted_nodes, accepted_lens, best_path, commit_lens, finish)
    return _call(plan, batch, (*reads, *writes))


def commit(
    accepted_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
    finish: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor | None = None,
    *,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    active: torch.Tensor,
    output_counts: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    draft_rows: dict[str, torch.Tensor] | None = None,
) -> list[KernelCall]:
    """`commit`, and with `draft_rows` that operation too.

    dense_lens  [B]  int32  the root's position; only with draft_rows
    draft_rows   the outputs of `draft_rows` by name: tokens, positions, row_live, write_lens, live_positions
    Raises ShapeError for shapes that do not fit.
    """
    batch, rows = accepted_tokens.shape
    for array in (commit_lens, finish, slots, draft_live, draft_lens):
        check_shape("commit_lens, finish, slots, draft_live and draft_lens", array, batch)
    check_shape("output_counts", output_counts, tokens.shape[0], output_counts.shape[1])
    plan = _plan(rows, 1, 1, 1, accepts=False)
    plan = _committing(plan, tokens, output_counts, head=draft_rows is not None)
    reads = (0, 0, 0, 0, slots, lengths, 0, 0, _dense(dense_lens, draft_rows))
    run = (accepted_tokens, 0, 0, 0, commit_lens, finish)
    state = (tokens, active, output_counts, num_drafts, draft_live, draft_lens)
    return _call(plan, batch, (*reads, *run, *state, *_head(draft_rows, batch, rows)))


def accept_and_commit(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    slots: torch.Tensor,
    finite: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    stop_ids: torch.Tensor,
    dense_lens: torch.Tensor | None = None,
    *,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    best_path: torch.Tensor,
    commit_lens: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    active: torch.Tensor,
    output_counts: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    draft_rows: dict[str, torch.Tensor] | None = None,
    mean_length: float | None = None,
    seed: int = 0,
) -> list[KernelCall]:
    """`accept` and `commit` of this module in one launch."""
    (first,) = accept(
        *(target_tokens, draft_tokens, paths, slots, finite, lengths, slot_ints, stop_ids),
        accepted_tokens=accepted_tokens,
        accepted_nodes=accepted_nodes,
        accepted_lens=accepted_lens,
        best_path=best_path,
        commit_lens=commit_lens,
        finish=finish,
        mean_length=mean_length,
        seed=seed,
    )
    (batch, rows), (num_paths, width) = target_tokens.shape, paths.shape[1:]
    plan = _plan(rows, num_paths, width, stop_ids.shape[1], accepts=True, mean_length=mean_length, seed=seed)
    plan = _committing(plan, tokens, output_counts, head=draft_rows is not None)
    accepting = (*first.arguments[:8], _dense(dense_lens, draft_rows), *first.arguments[9:15])
    state = (tokens, active, output_counts, num_drafts, draft_live, draft_lens)
    return _call(plan, batch, (*accepting, *state, *_head(draft_rows, batch, rows)))


def _plan(
    rows: int,
    num_paths: int,
    width: int,
    stops: int,
    *,
    accepts: bool,
    mean_length: float | None = None,
    seed: int = 0,
) -> AcceptPlan:
    if rows > MAX_ROWS or num_paths > MAX_PATHS:
        raise ShapeError(f"acceptance takes at most {MAX_ROWS} rows and {MAX_PATHS} paths, got {rows} and {num_paths}")
    signed = (seed + 2**63) % 2**64 - 2**63
    return AcceptPlan(
        *(rows, num_paths, width, stops, 0, 0),
        accepts=accepts,
        commits=False,
        head=False,
        mean_length=mean_length,
        seed=signed if mean_length is not None else 0,
    )


def _committing(plan: AcceptPlan, tokens: torch.Tensor, output_counts: torch.Tensor, *, head: bool) -> AcceptPlan:
    context, vocabulary = tokens.shape[1], output_counts.shape[1]
    return replace(plan, context=context, vocabulary=vocabulary, commits=True, head=head)


def _dense(dense_lens: torch.Tensor | None, draft_rows: dict[str, torch.Tensor] | None) -> Argument:
    if draft_rows is None:
        return 0
    if dense_lens is None:
        raise ShapeError("the head's rows need dense_lens")
    return dense_lens


def _head(draft_rows: dict[str, torch.Tensor] | None, batch: int, rows: int) -> tuple[Argument, ...]:
    if draft_rows is None:
        return ()
    for name in ("tokens", "positions", "row_live"):
        check_shape(f"the head's {name}", draft_rows[name], batch, rows)
    check_shape("the head's write_lens", draft_rows["write_lens"], batch)
    check_shape("the head's live_positions", draft_rows["live_positions"], batch, 1)
    return tuple(draft_rows[name] for name in ("tokens", "positions", "row_live", "write_lens", "live_positions"))


def _call(plan: AcceptPlan, batch: int, arguments: tuple[Argument, ...]) -> list[KernelCall]:
    missing = NUM_ARGUMENTS - len(arguments)
    return [KernelCall(accept_kernel(plan), (batch, 1, 1), (*arguments, *[0] * missing))]


def examples() -> list[Kernel]:
    """What CI compiles: a chain and a tree, real and simulated, and the parts alone."""
    chain = AcceptPlan(4, 1, 8, 32, 8192, 128256, accepts=True, commits=True, head=True)
    tree = AcceptPlan(64, 42, 8, 32, 8192, 128256, accepts=True, commits=True, head=True)
    plans = (
        chain,
        tree,
        replace(chain, head=False),
        replace(tree, commits=False, head=False),
        replace(tree, accepts=False),
        replace(chain, mean_length=2.5, seed=7),
    )
    return [accept_kernel(plan) for plan in plans]
