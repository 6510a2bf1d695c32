"""This module plans trees: the best choices for a budget of rows, from measured acceptance by rank.

It assumes the same acceptance at a depth and rank under every parent, since a run's statistics tell no more. So the
acceptance length of a planned tree is an estimate: measure it before relying on it.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowlat.errors import ConfigError
from lowlat.speculators.tree.choices import MAX_DEPTH, MAX_NODES, MAX_RANKS

__all__ = ["TreePlan", "WhatIf", "what_if"]

NEARLY_BEST = 0.98  # share of the best length that is enough for a recommendation without step times


@dataclass(frozen=True)
class TreePlan:
    """The best tree for a budget, the limits that it needs, and its expected acceptance length.

    mean_acceptance_length   tokens a step, bonus included: 1 + the sum of all nodes' path acceptance
    chain_acceptance_length  the same for the longest chain within the budget
    tokens_per_s             mean_acceptance_length over the budget's step time; None without step times
    max_decoding_tokens      the budget, or fewer if no further node has a probability above 0
    """

    budget: int
    choices: tuple[tuple[int, ...], ...]
    max_path_len: int
    max_decoding_tokens: int
    max_non_leaves_per_layer: int
    mean_acceptance_length: float
    chain_acceptance_length: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class WhatIf:
    """A plan for each budget, in the given order, and the recommended one."""

    plans: tuple[TreePlan, ...]
    recommended: TreePlan


def what_if(
    acceptance_by_rank: Sequence[Sequence[float]],
    budgets: Sequence[int],
    *,
    step_times_s: Sequence[float] | None = None,
) -> WhatIf:
    """Find the best tree for each budget of rows, and recommend a budget.

    acceptance_by_rank   [S][ranks] probability that the target's token after an accepted parent at depth d is the
                         draft's choice of rank r; each row sums to at most 1
    budgets              rows a slot, root included, 1 to 64
    step_times_s         the time of a step for each budget. With them the budget with the most tokens a second is
                         recommended, without them the smallest budget within 2 % of the greatest length
    Nodes are chosen in descending order of their path's acceptance. Acceptance never grows along a path, so the tree is
    optimal. Time: B log B for the largest budget. Raises ConfigError for values that are not such probabilities.
    """
    table = _check_table(acceptance_by_rank)
    if not budgets:
        raise ConfigError("what_if needs at least one budget")
    for budget in budgets:
        if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= MAX_NODES:
            raise ConfigError(f"a budget must be an integer from 1 to {MAX_NODES}, got {budget!r}")
    if step_times_s is not None and (len(step_times_s) != len(budgets) or not all(t > 0 for t in step_times_s)):
        raise ConfigError(f"step_times_s must give each of the {len(budgets)} budgets a positive time")
    nodes = _best_nodes(table, max(budgets) - 1)
    times = [None] * len(budgets) if step_times_s is None else list(step_times_s)
    plans = tuple(_plan(table, nodes, budget, time) for budget, time in zip(budgets, times, strict=True))
    if step_times_s is not None:
        return WhatIf(plans, max(plans, key=lambda plan: plan.tokens_per_s or 0.0))
    enough = NEARLY_BEST * max(plan.mean_acceptance_length for plan in plans)
    good = [plan for plan in plans if plan.mean_acceptance_length >= enough]
    return WhatIf(plans, min(good, key=lambda plan: plan.max_decoding_tokens))


def _check_table(table: Sequence[Sequence[float]]) -> list[list[float]]:
    if len(table) > MAX_DEPTH:
        raise ConfigError(f"acceptance_by_rank has {len(table)} depths; a tree is at most {MAX_DEPTH} deep")
    for depth, row in enumerate(table):
        if len(row) > MAX_RANKS:
            raise ConfigError(f"acceptance_by_rank[{depth}] has {len(row)} ranks; at most {MAX_RANKS}")
        for value in row:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
                raise ConfigError(f"acceptance_by_rank[{depth}] must hold probabilities, got {value!r}")
        if math.fsum(row) > 1.0 + 1e-6:
            raise ConfigError(f"acceptance_by_rank[{depth}] adds up to {math.fsum(row):.6f}, above 1")
    return [list(row) for row in table]


def _best_nodes(table: list[list[float]], count: int) -> list[tuple[float, tuple[int, ...]]]:
    """The likeliest `count` paths, each after its parent; of ties the shallower comes first, then the lower rank."""
    best: list[tuple[float, tuple[int, ...]]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def open_children(acceptance: float, path: tuple[int, ...]) -> None:
        for rank, value in enumerate(table[len(path)] if len(path) < len(table) else ()):
            if acceptance * value > 0.0:
                heapq.heappush(heap, (-acceptance * value, len(path) + 1, (*path, rank)))

    open_children(1.0, ())
    while heap and len(best) < count:
        negated, _, path = heapq.heappop(heap)
        best.append((-negated, path))
        open_children(-negated, path)
    return best


def _plan(
    table: list[list[float]], nodes: list[tuple[float, tuple[int, ...]]], budget: int, step_time_s: float | None
) -> TreePlan:
    chosen = nodes[: budget - 1]
    choices = tuple(sorted((path for _, path in chosen), key=lambda path: (len(path), path)))
    non_leaves = {path[:-1] for path in choices}
    length = 1.0 + math.fsum(acceptance for acceptance, _ in chosen)
    chain, acceptance = 1.0, 1.0
    for row in table[: budget - 1]:
        acceptance *= row[0] if row else 0.0
        chain += acceptance
    return TreePlan(
        budget=budget,
        choices=choices,
        max_path_len=1 + max((len(path) for path in choices), default=0),
        max_decoding_tokens=1 + len(choices),
        max_non_leaves_per_layer=max(
            (sum(len(path) == depth for path in non_leaves) for depth in range(MAX_DEPTH)), default=0
        )
        or 1,
        mean_acceptance_length=length,
        chain_acceptance_length=chain,
        tokens_per_s=None if step_time_s is None else length / step_time_s,
    )
