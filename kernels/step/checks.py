"""This module launches a step's checks: `check_slots`, `check_rows`, `check_accepted`, `check_commit`, a launch each.

They are for debugging. Each is one block that looks at all slots, for a few microseconds.
"""

from lowlat.errors import ShapeError
from lowlat.kernels.reference.step import checks as reference
from lowlat.kernels.step.check_rows_kernel import MAX_ROWS, AcceptedPlan, RowsPlan, accepted_kernel, rows_kernel
from lowlat.kernels.step.check_slots_kernel import CommitPlan, SlotsPlan, commit_kernel, slots_kernel
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches

__all__ = ["check_accepted", "check_commit", "check_rows", "check_slots", "examples"]

MAX_SLOTS = 32


@launches(reference.check_slots)
def check_slots(given: Given) -> list[KernelCall]:
    """`check_slots` of the reference; staged_table may lie in pinned host memory.

    Time: the tables of all slots are read once. Raises ShapeError for more slots than a block looks at.
    """
    batch, max_batch, blocks = given.sizes("B", "max_B", "blocks")
    _check_sizes(batch)
    plan = SlotsPlan(batch=batch, max_batch=max_batch, table=blocks, **given.params)
    return [KernelCall(slots_kernel(plan), (1, 1, 1), given.tensors)]


@launches(reference.check_rows)
def check_rows(given: Given) -> list[KernelCall]:
    """`check_rows` of the reference. Raises ShapeError for more slots or rows than a block looks at."""
    batch, rows, num_paths, width, max_batch = given.sizes("B", "T", "P", "W", "max_B")
    _check_sizes(batch, rows)
    plan = RowsPlan(batch=batch, rows=rows, num_paths=num_paths, width=width, max_batch=max_batch, **given.params)
    return [KernelCall(rows_kernel(plan), (1, 1, 1), given.tensors)]


@launches(reference.check_accepted)
def check_accepted(given: Given) -> list[KernelCall]:
    """`check_accepted` of the reference. Raises ShapeError for more slots or rows than a block looks at."""
    batch, rows, max_batch = given.sizes("B", "T", "max_B")
    _check_sizes(batch, rows)
    plan = AcceptedPlan(batch, rows, max_batch, given.params["falls_back"])
    return [KernelCall(accepted_kernel(plan), (1, 1, 1), given.tensors)]


@launches(reference.check_commit)
def check_commit(given: Given) -> list[KernelCall]:
    """`check_commit` of the reference. Raises ShapeError for more slots than a block looks at.

    ring_head and ring_checks may lie in pinned host memory; what is written is seen there when the step is published,
    which comes later.
    """
    batch, max_batch, ring = given.sizes("B", "max_B", "R")
    _check_sizes(batch)
    plan = CommitPlan(batch, max_batch, ring, given.params["checks_lengths"])
    return [KernelCall(commit_kernel(plan), (1, 1, 1), given.tensors)]


def _check_sizes(batch: int, rows: int = 1) -> None:
    if batch > MAX_SLOTS or rows > MAX_ROWS:
        raise ShapeError(f"checks take at most {MAX_SLOTS} slots of {MAX_ROWS} rows, got {batch} of {rows}")


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: a chain's checks, a tree's, and those of a first token."""
    chain = SlotsPlan(1, 4, 257, 8192, 4, 4, 32, 1029, True, True, True, False, False)
    first = SlotsPlan(8, 8, 1025, 32768, 64, 64, 32, 8193, True, True, False, True, False)
    return [
        *(slots_kernel(plan) for plan in (chain, first)),
        rows_kernel(RowsPlan(1, 4, 1, 4, 4, 8192, True, True, True, True)),
        rows_kernel(RowsPlan(8, 64, 42, 8, 8, 32768, True, True, True, False)),
        accepted_kernel(AcceptedPlan(8, 64, 8, True)),
        commit_kernel(CommitPlan(8, 8, 64, True)),
    ]
