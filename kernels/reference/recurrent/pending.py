"""This module keeps pending rows, by which a recurrent state is rewound without losing a bit.

`state_lens[slot]` is the number of tokens that a slot's states contain. A step has rows at positions dense + t. First
it applies the dense - state_lens rows of the previous step that were accepted, and writes the states once. Then it goes
through its own rows and keeps them as the new pending rows. So the states never contain a row that may be rejected, a
rewind only changes a length, and T rows have the bits of T single steps: one helper applies pending and own rows.

Pending rows and the convolution's inputs are kept in rings, by position. A step writes none of the places that it
reads, and a rewind moves nothing. A ring of pending rows has two places for each row that a slot may have in a step.

The live rows of a slot are a prefix of its T rows: a chain. After the last layer `advance_states` sets the lengths.
A chunk of prefill has no pending rows. It begins with zero at position 0, else with the slot's states, and stores the
states after its last row. The states have R rows: one a slot, then snapshots. `snapshots` names the row with which a
chunk begins, -1 for the slot's own. Then it names the snapshots that the chunk stores, as pairs: a row, -1 for none,
and the number of the chunk's positions after which the state is stored there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lowlat.errors import DeviceError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.row_blocks import sigmoid

__all__ = [
    "SlotRows",
    "advance_states",
    "prefill_advance_states",
    "prefill_rows",
    "ring_places",
    "rounded_silu",
    "slot_rows",
]


class SlotRows(NamedTuple):
    """The live rows of one slot in a step.

    slot         its number
    rows         its live rows, of the step's M
    start        the position of the first
    num_pending  accepted rows of the previous step that its states do not contain yet
    """

    slot: int
    rows: range
    start: int
    num_pending: int


def ring_places(start: int, count: int, size: int) -> list[int]:
    """Return the places of `count` positions from `start` on, in a ring of `size` places."""
    return [position % size for position in range(start, start + count)]


def slot_rows(
    slots: torch.Tensor, dense_lens: torch.Tensor, state_lens: torch.Tensor, row_live: torch.Tensor, most: int
) -> Iterator[SlotRows]:
    """List the slots of a step that have live rows. Arguments are the operations'; most: pending rows that are kept.

    Raises DeviceError if a slot has more pending rows than are kept, or fewer than 0.
    """
    lives = row_live.reshape(slots.shape[0], -1)
    for index, (slot, dense) in enumerate(zip(slots.tolist(), dense_lens.tolist(), strict=True)):
        count = int(lives[index].sum()) if slot >= 0 else 0
        if not count:
            continue
        pending = dense - int(state_lens[slot])
        if not 0 <= pending <= most:
            raise DeviceError(
                f"slot {slot} goes on at position {dense}, its recurrent states are of {int(state_lens[slot])} tokens, "
                f"and {most} rows are kept"
            )
        first = index * lives.shape[1]
        yield SlotRows(slot, range(first, first + count), dense, pending)


def prefill_rows(
    slot: torch.Tensor, chunk: torch.Tensor, snapshots: torch.Tensor | None
) -> tuple[int, list[tuple[int, int]]]:
    """Return the row of the states with which a chunk begins, and the rows that it stores, each after how many rows."""
    own, count = int(slot), int(chunk[1])
    if snapshots is None:
        return own, [(own, count)]
    begin, *pairs = snapshots.reshape(-1).tolist()
    kept = [(row, after) for row, after in zip(pairs[::2], pairs[1::2], strict=True) if row >= 0]
    return own if begin < 0 else begin, [*kept, (own, count)]


def rounded_silu(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute silu in float32 of numbers [..., N], first rounded to a dtype; no number's bits depend on N."""
    rounded = x.to(dtype).float()
    return rounded * sigmoid(rounded)


@operation("""
    read    slots       int32  [B]         -1 pads
    read    dense_lens  int32  [B]         the root's position
    read    row_live    uint8  flat [B * R]
    update  state_lens  int32  [max_B]     set for slots whose root is live
""")
def advance_states(
    slots: torch.Tensor, dense_lens: torch.Tensor, row_live: torch.Tensor, *, state_lens: torch.Tensor
) -> None:
    """Set the lengths of the slots' states to the positions before the step's rows.

    It runs once a step, after the last layer.
    """
    roots = row_live.reshape(slots.shape[0], -1)[:, 0]
    for slot, dense, live in zip(slots.tolist(), dense_lens.tolist(), roots.tolist(), strict=True):
        if slot >= 0 and live:
            state_lens[slot] = dense


@operation("""
    read    slot        int32  [1]
    read    chunk       int32  [2]      start, live rows
    update  state_lens  int32  [max_B]
""")
def prefill_advance_states(slot: torch.Tensor, chunk: torch.Tensor, *, state_lens: torch.Tensor) -> None:
    """Set the length of the slot's states to the end of the chunk's live rows.

    It runs once a chunk, after the last layer.
    """
    state_lens[int(slot)] = int(chunk.sum())
