"""Acceptance and commit: `accept`, `truncate`, `commit` and `draft_rows` of the reference, alone or all in one launch.

A block has a slot. A tree's rows may be compacted after all of it: compaction reads nothing that a commit changes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.speculation.accept_kernel import ARGUMENTS, MAX_PATHS, MAX_ROWS, AcceptPlan, accept_kernel
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall

__all__ = ["accept", "accept_and_commit", "accept_simulated", "commit", "draft_rows", "examples", "truncate"]

BY_ROW = (
    *("target_tokens", "draft_tokens", "finite", "accepted_tokens", "accepted_nodes"),
    *("row_tokens", "row_positions", "row_live"),
)
BY_SLOT = (
    *("slots", "dense_lens", "accepted_lens", "best_path", "commit_lens", "finish"),
    *("draft_live", "draft_lens", "write_lens"),
)


def accept(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    slots: torch.Tensor,
    *,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    best_path: torch.Tensor,
) -> list[KernelCall]:
    """`accept` of the reference, whose arguments these are; a path's pads come last.

    Time: two trips to memory. Raises ShapeError for shapes that do not fit, as all functions here do.
    """
    return _calls(locals(), accepts=True)


def accept_simulated(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    best_path: torch.Tensor,
    probability: float,
    seed: int,
) -> list[KernelCall]:
    """`accept_simulated` of the reference, whose arguments these are."""
    given = {name: value for name, value in locals().items() if name in ARGUMENTS}
    return _calls(given, accepts=True, probability=probability, seed=seed)


def truncate(
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    finite: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    stop_ids: torch.Tensor,
    *,
    commit_lens: torch.Tensor,
    finish: torch.Tensor,
) -> list[KernelCall]:
    """`truncate` of the reference, whose arguments these are."""
    return _calls(locals(), truncates=True)


def commit(
    accepted_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
    finish: torch.Tensor,
    slots: torch.Tensor,
    *,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    active: torch.Tensor,
    output_counts: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
) -> list[KernelCall]:
    """`commit` of the reference, whose arguments these are."""
    return _calls(locals(), commits=True)


def draft_rows(
    accepted_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
    draft_live: torch.Tensor,
    dense_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    live_positions: torch.Tensor,
) -> list[KernelCall]:
    """`draft_rows` of the reference, whose arguments these are."""
    return _calls(_renamed(locals()), lays_out=True)


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
    draft_rows: Mapping[str, torch.Tensor] | None = None,
    probability: float | None = None,
    seed: int = 0,
) -> list[KernelCall]:
    """`accept` (with a probability `accept_simulated`), `truncate`, `commit` and maybe `draft_rows`, in one launch.

    dense_lens  [B]  int32  with draft_rows
    draft_rows  the outputs of `draft_rows` by name; None: it is not done
    """
    given = {name: value for name, value in locals().items() if name in ARGUMENTS and value is not None}
    if draft_rows is not None:
        if dense_lens is None:
            raise ShapeError("draft_rows needs dense_lens, got none")
        given.update(_renamed(draft_rows))
    return _calls(
        given,
        accepts=True,
        truncates=True,
        commits=True,
        lays_out=draft_rows is not None,
        probability=probability,
        seed=seed,
    )


def _renamed(arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arguments of `draft_rows` by the names that the kernel has for them, whose `tokens` are the committed ones."""
    names = {"tokens": "row_tokens", "positions": "row_positions"}
    return {names.get(name, name): value for name, value in arguments.items()}


def _calls(
    given: Mapping[str, torch.Tensor],
    *,
    accepts: bool = False,
    truncates: bool = False,
    commits: bool = False,
    lays_out: bool = False,
    probability: float | None = None,
    seed: int = 0,
) -> list[KernelCall]:
    """The launch of these operations over arguments by the kernel's names."""
    batch, rows = given["accepted_tokens"].shape
    for names, shape in ((BY_ROW, (batch, rows)), (BY_SLOT, (batch,)), (("live_positions",), (batch, 1))):
        for name in names:
            if name in given:
                check_shape(name, given[name], *shape)
    num_paths = width = stops = context = vocabulary = 1
    if accepts:
        _, num_paths, width = given["paths"].shape
        check_shape("paths", given["paths"], batch, num_paths, width)
    if truncates:
        stops = given["stop_ids"].shape[1]
    if commits:
        context, vocabulary = given["tokens"].shape[1], given["output_counts"].shape[1]
        check_shape("output_counts", given["output_counts"], given["tokens"].shape[0], vocabulary)
    if rows > MAX_ROWS or num_paths > MAX_PATHS:
        raise ShapeError(f"acceptance takes at most {MAX_ROWS} rows and {MAX_PATHS} paths, got {rows} and {num_paths}")
    signed = (seed + 2**63) % 2**64 - 2**63 if probability is not None else 0
    parts = (accepts, truncates, commits, lays_out, probability, signed)
    plan = AcceptPlan(rows, num_paths, width, stops, context, vocabulary, *parts)
    return [KernelCall(accept_kernel(plan), (batch, 1, 1), tuple(given.get(name, 0) for name in ARGUMENTS))]


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: a chain and a tree, real and simulated, and each operation alone."""
    chain = AcceptPlan(4, 1, 8, 32, 8192, 128256, accepts=True, truncates=True, commits=True, lays_out=True)
    tree = replace(chain, rows=64, num_paths=42)
    lone = replace(tree, accepts=False, truncates=False, commits=False, lays_out=False)
    plans = (
        chain,
        tree,
        replace(chain, lays_out=False),
        replace(chain, probability=0.75, seed=7),
        *(replace(lone, **{part: True}) for part in ("accepts", "truncates", "commits", "lays_out")),
    )
    return [accept_kernel(plan) for plan in plans]
