"""Checks of a step: `check_slots`, `check_rows`, `check_accepted` and `check_commit` of the reference, a launch each.

They are for debugging: a block of its own looks at all slots, a few microseconds each.
"""

from collections.abc import Mapping

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.checks import WIDTH
from lowlat.kernels.reference.step.slot_record import NUM_INTS
from lowlat.kernels.step.check_rows_kernel import MAX_ROWS, AcceptedPlan, RowsPlan, accepted_kernel, rows_kernel
from lowlat.kernels.step.check_slots_kernel import CommitPlan, SlotsPlan, commit_kernel, slots_kernel
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall

__all__ = ["check_accepted", "check_commit", "check_rows", "check_slots", "examples"]

MAX_SLOTS = 32
BY_ENTRY = (
    *("slots", "dense_lens", "num_verified", "accepted_lens", "commit_lens"),
    *("draft_live", "draft_lens"),
)
BY_SLOT = ("lengths", "active", "num_drafts", "checked_lengths")
BY_ROW = ("row_tokens", "row_positions", "row_live", "row_masks", "accepted_nodes")


def check_slots(
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    staged_table: torch.Tensor,
    *,
    slots: torch.Tensor,
    active: torch.Tensor,
    num_drafts: torch.Tensor,
    slot_ints: torch.Tensor,
    checked_lengths: torch.Tensor,
    check_failures: torch.Tensor,
    checks_lengths: bool,
    checks_spans: bool,
    falls_back: bool,
    joins: bool,
    rewinds: bool,
    max_context: int,
    max_rows: int,
    overhang: int,
    block_size: int,
    num_blocks: int,
) -> list[KernelCall]:
    """`check_slots` of the reference, whose arguments these are; staged_table may lie in pinned host memory.

    Time: the tables of all slots are read once. Raises ShapeError for shapes that do not fit, as all functions here do.
    """
    batch, max_batch = _check({name: each for name, each in locals().items() if isinstance(each, torch.Tensor)})
    check_shape("staged_table", staged_table, *block_table.shape)
    sizes = (batch, max_batch, block_table.shape[1], max_context, max_rows, overhang, block_size, num_blocks)
    plan = SlotsPlan(*sizes, checks_lengths, checks_spans, falls_back, joins, rewinds)
    arguments = (lengths, block_table, staged_table, slots, active, num_drafts, slot_ints, checked_lengths)
    return [KernelCall(slots_kernel(plan), (1, 1, 1), (*arguments, check_failures))]


def check_rows(
    lengths: torch.Tensor,
    paths: torch.Tensor,
    *,
    slots: torch.Tensor,
    active: torch.Tensor,
    num_drafts: torch.Tensor,
    slot_ints: torch.Tensor,
    row_tokens: torch.Tensor,
    row_positions: torch.Tensor,
    row_live: torch.Tensor,
    row_masks: torch.Tensor,
    dense_lens: torch.Tensor,
    num_verified: torch.Tensor,
    check_failures: torch.Tensor,
    checks_lengths: bool,
    checks_spans: bool,
    checks_masks: bool,
    falls_back: bool,
    max_context: int,
) -> list[KernelCall]:
    """`check_rows` of the reference, whose arguments these are, of at most 64 rows a slot."""
    batch, max_batch = _check({name: each for name, each in locals().items() if isinstance(each, torch.Tensor)})
    rows, (num_paths, width) = row_live.shape[1], paths.shape[1:]
    check_shape("paths", paths, batch, num_paths, width)
    kinds = (checks_lengths, checks_spans, checks_masks, falls_back)
    plan = RowsPlan(batch, rows, num_paths, width, max_batch, max_context, *kinds)
    arguments = (
        *(lengths, paths, slots, active, num_drafts, slot_ints, row_tokens, row_positions, row_live, row_masks),
        *(dense_lens, num_verified, check_failures),
    )
    return [KernelCall(rows_kernel(plan), (1, 1, 1), arguments)]


def check_accepted(
    accepted_nodes: torch.Tensor,
    row_live: torch.Tensor,
    row_masks: torch.Tensor,
    num_verified: torch.Tensor,
    *,
    slots: torch.Tensor,
    active: torch.Tensor,
    num_drafts: torch.Tensor,
    slot_ints: torch.Tensor,
    accepted_lens: torch.Tensor,
    check_failures: torch.Tensor,
    falls_back: bool,
) -> list[KernelCall]:
    """`check_accepted` of the reference, whose arguments these are, of at most 64 rows a slot."""
    batch, max_batch = _check({name: each for name, each in locals().items() if isinstance(each, torch.Tensor)})
    plan = AcceptedPlan(batch, row_live.shape[1], max_batch, falls_back)
    arguments = (
        *(accepted_nodes, row_live, row_masks, num_verified, slots, active, num_drafts, slot_ints),
        *(accepted_lens, check_failures),
    )
    return [KernelCall(accepted_kernel(plan), (1, 1, 1), arguments)]


def check_commit(
    commit_lens: torch.Tensor,
    accepted_lens: torch.Tensor,
    lengths: torch.Tensor,
    ring_head: torch.Tensor,
    *,
    slots: torch.Tensor,
    active: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    checked_lengths: torch.Tensor,
    check_failures: torch.Tensor,
    ring_checks: torch.Tensor,
    checks_lengths: bool,
) -> list[KernelCall]:
    """`check_commit` of the reference, whose arguments these are.

    ring_head and ring_checks may lie in pinned host memory; what is written is seen there when the step is published,
    which comes later.
    """
    batch, max_batch = _check({name: each for name, each in locals().items() if isinstance(each, torch.Tensor)})
    check_shape("ring_checks", ring_checks, ring_checks.shape[0], max_batch + 1, WIDTH)
    plan = CommitPlan(batch, max_batch, ring_checks.shape[0], checks_lengths)
    arguments = (
        *(commit_lens, accepted_lens, lengths, ring_head, slots, active, draft_live, draft_lens),
        *(checked_lengths, check_failures, ring_checks),
    )
    return [KernelCall(commit_kernel(plan), (1, 1, 1), arguments)]


def _check(given: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """The slots of the bucket, and all. Raises ShapeError for shapes that do not fit each other, or one block."""
    batch, max_batch = given["slots"].shape[0], given["active"].shape[0]
    rows = next((given[name].shape[1] for name in BY_ROW if name in given), 1)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(BY_ENTRY, (batch,)),
        **dict.fromkeys(BY_SLOT, (max_batch,)),
        **dict.fromkeys(BY_ROW, (batch, rows)),
        "slot_ints": (max_batch, NUM_INTS),
        "check_failures": (max_batch + 1, WIDTH),
    }
    for name, tensor in given.items():
        if name in shapes:
            check_shape(name, tensor, *shapes[name])
    if batch > MAX_SLOTS or rows > MAX_ROWS:
        raise ShapeError(f"checks take at most {MAX_SLOTS} slots of {MAX_ROWS} rows, got {batch} of {rows}")
    return batch, max_batch


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
