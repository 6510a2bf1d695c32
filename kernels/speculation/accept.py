"""This module launches `accept`, `truncate`, `commit` and `draft_rows` of the reference, alone or all in one launch.

A block has a slot. A tree's rows may be compacted after that, since compaction reads nothing that a commit changes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.speculation import accept as reference
from lowlat.kernels.reference.speculation.draft_rows import draft_rows as draft_rows_reference
from lowlat.kernels.speculation.accept_kernel import ARGUMENTS, MAX_PATHS, MAX_ROWS, AcceptPlan, accept_kernel
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, among, fit, launches

__all__ = ["accept", "accept_and_commit", "accept_simulated", "commit", "draft_rows", "examples", "truncate"]


@launches(reference.accept)
def accept(given: Given) -> list[KernelCall]:
    """`accept` of the reference; a path's pads come last.

    Time: two trips to memory. Raises ShapeError for too many rows or paths.
    """
    return _calls(given.arrays, accepts=True)


@launches(reference.accept_simulated)
def accept_simulated(given: Given) -> list[KernelCall]:
    """`accept_simulated` of the reference. Raises ShapeError as `accept` does."""
    return _calls(given.arrays, accepts=True, **given.params)


@launches(reference.truncate)
def truncate(given: Given) -> list[KernelCall]:
    """`truncate` of the reference."""
    return _calls(given.arrays, truncates=True)


@launches(reference.commit)
def commit(given: Given) -> list[KernelCall]:
    """`commit` of the reference."""
    return _calls(given.arrays, commits=True)


@launches(draft_rows_reference)
def draft_rows(given: Given) -> list[KernelCall]:
    """`draft_rows` of the reference."""
    return _calls(_renamed(given.arrays), lays_out=True)


def accept_and_commit(
    *,
    draft_rows: Mapping[str, torch.Tensor] | None = None,
    probability: float | None = None,
    seed: int = 0,
    **arguments: torch.Tensor,
) -> list[KernelCall]:
    """`accept` (with a probability `accept_simulated`), `truncate`, `commit` and maybe `draft_rows`, in one launch.

    arguments   of these operations by name, the outputs of `draft_rows` left out
    draft_rows  these by name; None: it is not done
    """
    given: dict[str, torch.Tensor] = {}
    for each in (reference.accept, reference.truncate, reference.commit):
        given |= fit(each, among(each, arguments)).arrays
    if draft_rows is not None:
        given |= _renamed(fit(draft_rows_reference, among(draft_rows_reference, {**arguments, **draft_rows})).arrays)
    kinds = {"accepts": True, "truncates": True, "commits": True, "lays_out": draft_rows is not None}
    return _calls(given, **kinds, probability=probability, seed=seed)


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
    """The launch of these operations over arguments by the kernel's names, which fit."""
    batch, rows = given["accepted_tokens"].shape
    _, num_paths, width = given["paths"].shape if accepts else (batch, 1, 1)
    stops = given["stop_ids"].shape[1] if truncates else 1
    context, vocabulary = (given[name].shape[1] if commits else 1 for name in ("tokens", "output_counts"))
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
