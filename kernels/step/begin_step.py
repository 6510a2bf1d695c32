"""This module launches a step's start, of four operations, each alone or all in one launch.

They are `apply_commands`, `list_active_slots`, `gather_rows` and `publish_rows` of the reference. One block does it
all. Of a joining slot's `tokens`, only the first LENGTH are copied; the others are never read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation.draft_lengths import choose_draft_length
from lowlat.kernels.reference.speculation.draft_rows import check_nodes, tree_masks
from lowlat.kernels.reference.step import slots
from lowlat.kernels.reference.step.slots import MAX_PATH_NODES
from lowlat.kernels.speculation.choose_draft_length import ChoicePlan, choice_plan
from lowlat.kernels.step.begin_step_kernel import ARGUMENTS, BeginStepPlan, begin_step_kernel
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import among, fit

__all__ = ["Choice", "apply_commands", "begin_step", "examples", "gather_rows", "list_active_slots", "publish_rows"]

THREADS, MOST_THREADS = 512, 1024
MAX_ROWS = 64


@dataclass(frozen=True)
class Choice:
    """The parameters of `choose_draft_length`, without its arrays.

    row           the bucket's row of the costs
    most_waiting  the most positions that may wait for the draft model; 0: positions never wait
    condition     the handle of the SWITCH node that the choice controls; None: there is none
    """

    row: int
    most_waiting: int
    condition: int | None = None

    @property
    def params(self) -> dict[str, int]:
        """The operation's parameters."""
        return {"row": self.row, "most_waiting": self.most_waiting}


def apply_commands(**arguments: torch.Tensor) -> list[KernelCall]:
    """`apply_commands` of the reference, whose arguments these are, by name.

    command_ring, command_tail and staged_* may be in pinned host memory. At most a whole ring of commands waits.
    Time: one access to the host's memory, and a few microseconds for each slot that joins. Like all functions here it
    raises ShapeError for shapes that do not fit, and for other arguments.
    """
    return _calls(arguments, applies=True)


def list_active_slots(**arguments: torch.Tensor) -> list[KernelCall]:
    """`list_active_slots` of the reference, whose arguments these are, by name."""
    return _calls(arguments, lists=True)


def gather_rows(**arguments: torch.Tensor) -> list[KernelCall]:
    """`gather_rows` of the reference, whose arguments these are, by name.

    grammar_forced and grammar_decided may be in pinned host memory. With more than one row, a slot with a grammar waits
    until grammar_decided is at least its length; a launch that waits too long ends with an error.
    """
    return _calls(arguments, gathers=True)


def publish_rows(*, most_drafts: int = 0, **arguments: torch.Tensor) -> list[KernelCall]:
    """`publish_rows` of the reference, whose arguments these are, by name. grammar_* may lie in pinned host memory."""
    return _calls(arguments, tells=True, most_drafts=most_drafts)


def begin_step(
    arguments: Mapping[str, torch.Tensor],
    *,
    applies: bool = True,
    lists: bool = True,
    tells: bool = True,
    hands: bool = False,
    choice: Choice | None = None,
    most_drafts: int = 0,
) -> list[KernelCall]:
    """Launch `gather_rows` with operations before and after it; takes the arguments of all.

    applies      run `apply_commands`, too
    lists        run `list_active_slots`, too; else `slots` lists the slots
    tells        run `publish_rows`, too, with `most_drafts`
    hands        run `tree_masks` first
    choice       run `choose_draft_length` with these parameters; None: do not
    Time: two accesses to memory, and a few microseconds for each slot that joins.
    """
    return _calls(
        arguments,
        applies=applies,
        lists=lists,
        gathers=True,
        tells=tells,
        hands=hands,
        choice=choice,
        most_drafts=most_drafts,
    )


def _calls(
    given: Mapping[str, torch.Tensor],
    *,
    applies: bool = False,
    lists: bool = False,
    gathers: bool = False,
    tells: bool = False,
    hands: bool = False,
    choice: Choice | None = None,
    most_drafts: int = 0,
) -> list[KernelCall]:
    """Make the launch of these operations, from arguments by name."""
    operations = (
        *((slots.apply_commands, applies), (slots.list_active_slots, lists), (slots.gather_rows, gathers)),
        *((slots.publish_rows, tells), (tree_masks, hands), (choose_draft_length, choice is not None)),
    )
    params = {"most_drafts": most_drafts} | ({} if choice is None else choice.params)
    fitted = {each: fit(each, among(each, {**given, **params})) for each, does in operations if does}
    unknown = given.keys() - {name for each in fitted.values() for name in each.arrays}
    if unknown:
        raise ShapeError(f"the step's start takes no {', '.join(sorted(unknown))}")
    if tells and most_drafts > 0 and "draft_length_choice" not in given:
        raise ShapeError(f"most_drafts of {most_drafts} needs draft_length_choice, got none")

    def extent(name: str, axis: int) -> int:
        return given[name].shape[axis] if name in given else 1

    plan = BeginStepPlan(
        batch=extent("slots", 0),
        rows=extent("row_tokens", 1),
        num_paths=extent("tree_paths", 1),
        width=extent("tree_paths", 2),
        max_batch=extent("active" if "active" in given else "lengths", 0),
        max_rows=extent("drafts" if gathers else "grammar_tokens", 1),
        context=extent("tokens", 1),
        vocabulary=extent("prompt_seen", 1),
        table=extent("block_table", 1),
        stops=extent("stop_ids", 1),
        biases=extent("bias_ids", 1),
        ring=extent("command_ring", 0),
        threads=THREADS if 32 * extent("slots", 0) <= THREADS else MOST_THREADS,
        applies=applies,
        lists=lists,
        gathers=gathers,
        tells=tells,
        most_drafts=most_drafts,
    )
    if hands:
        known_paths, known_length = given["topology_paths"].shape
        nodes = check_nodes(given["draft_nodes"], plan.batch, plan.rows)
        plan = replace(plan, known_paths=known_paths, known_length=known_length, nodes=nodes)
    condition = None
    if choice is not None:
        condition = choice.condition
        plan = replace(plan, choice=choice_plan(fitted[choose_draft_length], switching=condition is not None))
    _check(given, plan)
    arguments = (*(given.get(name, 0) for name in ARGUMENTS[:-1]), condition or 0)
    return [KernelCall(begin_step_kernel(plan), (1, 1, 1), arguments)]


def _check(given: Mapping[str, torch.Tensor], plan: BeginStepPlan) -> None:
    """Raise ShapeError for arrays of several operations that do not fit each other, or one block."""
    for name, shape in (("grammar_tokens", (plan.max_batch, plan.max_rows)), ("topology_masks", (plan.rows,))):
        if name in given:
            check_shape(name, given[name], *shape)
    if plan.known_paths > plan.num_paths or plan.known_length > plan.width:
        known = f"{plan.known_paths} by {plan.known_length}"
        raise ShapeError(f"paths of {known} do not fit {plan.num_paths} by {plan.width}")
    num_nodes = plan.batch * plan.num_paths * plan.width
    most = MOST_THREADS // 32  # a warp an entry
    if plan.max_batch > THREADS or plan.batch > most or plan.rows > MAX_ROWS or num_nodes > MAX_PATH_NODES:
        raise ShapeError(
            f"a step begins with at most {most} slots of {MAX_ROWS} rows, {MAX_PATH_NODES} in paths: {plan}"
        )


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: a chain's bucket, a first token's, a tree's, its operations alone."""
    parts: dict[str, Any] = dict.fromkeys(("applies", "lists", "gathers", "tells"), True)
    chain = BeginStepPlan(1, 4, 1, 4, 4, 8, 8192, 128256, 513, 32, 300, 64, THREADS, **parts)
    tree = BeginStepPlan(8, 64, 42, 8, 8, 64, 32768, 201088, 2052, 32, 300, 64, THREADS, **parts)
    lone = [replace(tree, **{**parts, **dict.fromkeys(parts, False), part: True}) for part in parts]
    first = replace(chain, rows=1, lists=False)
    opening = replace(chain, rows=1, most_drafts=7, choice=ChoicePlan(4, 7, 0, 16, switching=True))
    many = replace(opening, batch=32, max_batch=32, ring=256, threads=MOST_THREADS, choice=ChoicePlan(32, 3, 0, 4))
    drafted = replace(chain, applies=False, lists=False, known_paths=1, known_length=4, nodes=8)
    return [begin_step_kernel(plan) for plan in (chain, first, tree, opening, many, drafted, *lone)]
