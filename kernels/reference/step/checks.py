"""This module checks a step on the device: lengths, the KV blocks that it reads and writes, tree masks.

If a runtime asks for checks, they are emitted between a step's operations. A slot whose check fails is taken off the
list of slots, so the step commits and publishes nothing for it. The slot ends, or it continues without drafts. If
several checks fail at a slot, the one of the lowest code, then of the lowest place, is reported.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, LENGTH, MAX_LENGTH, NUM_INTS

__all__ = [
    "ACCEPTED_LENGTH",
    "ACCEPTED_NODE",
    "ADVANCED",
    "BLOCK_BOUNDS",
    "BLOCK_RESERVED",
    "BLOCK_SHARED",
    "CODE",
    "COMMITTED_LENGTH",
    "DENSE",
    "DRAFTS_BOUNDS",
    "DRAFT_LIMIT_BOUNDS",
    "ENDS",
    "EXPECTED",
    "LENGTH_BOUNDS",
    "LENGTH_CHANGED",
    "MASK_BEYOND",
    "MASK_CLOSED",
    "MASK_DEAD",
    "MASK_PATH",
    "MASK_SELF",
    "MASK_UNSEEN",
    "MAX_LENGTH_BOUNDS",
    "NULL_BLOCK",
    "PLACE",
    "POSITION",
    "START",
    "VALUE",
    "VERIFIED",
    "WIDTH",
    "check_accepted",
    "check_commit",
    "check_rows",
    "check_slots",
]

CODE, PLACE, VALUE, EXPECTED, ENDS, WIDTH = range(6)  # columns of a failure; a CODE of 0: there is none

# codes, by kind: lengths
MAX_LENGTH_BOUNDS, LENGTH_BOUNDS, LENGTH_CHANGED, DRAFTS_BOUNDS, DRAFT_LIMIT_BOUNDS = 1, 2, 3, 4, 5
DENSE, VERIFIED, ACCEPTED_LENGTH, ACCEPTED_NODE, COMMITTED_LENGTH, ADVANCED = 6, 7, 8, 9, 10, 11
START, NULL_BLOCK, BLOCK_BOUNDS, BLOCK_RESERVED, BLOCK_SHARED, POSITION = 20, 21, 22, 23, 24, 25  # spans
MASK_DEAD, MASK_SELF, MASK_BEYOND, MASK_CLOSED, MASK_PATH, MASK_UNSEEN = 40, 41, 42, 43, 44, 45  # masks
BITS = (1 << 64) - 1


class _Failure(NamedTuple):
    """A check that failed; the least one has the lowest code, then the lowest place."""

    code: int
    place: int
    value: int
    expected: int


@operation(f"""
    read    lengths          int32  [max_B]
    read    block_table      int32  [max_B, blocks]
    read    staged_table     int32  [max_B, blocks]           the blocks that the host has reserved for each slot
    update  slots            int32  [B]                       -1 where a check fails
    update  active           int32  [max_B]                   0 where a slot ends
    update  num_drafts       int32  [max_B]
    update  slot_ints        int64  [max_B, {NUM_INTS}]       DRAFT_LIMIT 0 if a slot continues without drafts
    update  checked_lengths  int32  [max_B]                   the committed tokens that the last step left
    update  check_failures   int64  [max_B + 1, {WIDTH}]      this step's by slot; the last row is of no slot
""")
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
) -> None:
    """Check the listed slots before anything is read through their lengths, counts and block tables.

    falls_back  a slot that may verify drafts continues without drafts; else it ends
    joins       the step is a prompt's first token: a slot's length is that of its record
    rewinds     a slot may have gone back to fewer tokens
    overhang    positions after a slot's tokens that a step may write
    num_blocks  blocks of the pool, with the null block
    """
    check_failures.zero_()
    listed = [(index, slot) for index, slot in enumerate(slots.tolist()) if slot >= 0]
    failures: dict[int, _Failure] = {}
    spans: dict[int, tuple[int, int]] = {}
    for index, slot in listed:
        length, ints = int(lengths[slot]), slot_ints[slot].tolist()
        found: list[_Failure] = []
        if checks_lengths:
            known = ints[LENGTH] if joins else int(checked_lengths[slot])
            found += _check_lengths(length, known, int(num_drafts[slot]), ints, max_context, max_rows, rewinds=rewinds)
        if checks_spans and not 1 <= length <= max_context:
            found.append(_Failure(START, 0, length - 1, max_context - 1))
        elif checks_spans:
            last = min((length - 1 + overhang) // block_size, block_table.shape[1] - 1)
            spans[index] = (length - (0 if joins else 1)) // block_size, last
            found += _check_table(block_table[slot].tolist(), staged_table[slot].tolist(), last, num_blocks)
        if found:
            failures[index] = min(found)
    tables = {index: block_table[slot].tolist() for index, slot in listed}
    whole = [index for index, _ in listed if index in spans and index not in failures]
    for index in whole:
        first, last = spans[index]
        others = {block for other in whole if other != index for block in tables[other][: spans[other][1] + 1]}
        shared = [place for place in range(first, last + 1) if tables[index][place] in others]
        if shared:
            block = tables[index][shared[0]]
            failures[index] = _Failure(BLOCK_SHARED, shared[0], block, 0)
    for index, slot in listed:
        if index in failures:
            _drop(index, failures[index], slots, active, num_drafts, slot_ints, check_failures, falls_back=falls_back)
        elif checks_lengths:
            checked_lengths[slot] = lengths[slot]


def _check_lengths(
    length: int, known: int, drafts: int, ints: Sequence[int], max_context: int, max_rows: int, *, rewinds: bool
) -> Iterator[_Failure]:
    longest = ints[MAX_LENGTH]
    if not 1 <= longest <= max_context:
        yield _Failure(MAX_LENGTH_BOUNDS, 0, longest, max_context)
    if not 1 <= length < longest:
        yield _Failure(LENGTH_BOUNDS, 0, length, longest - 1)
    if length > known or (length < known and not rewinds):
        yield _Failure(LENGTH_CHANGED, 0, length, known)
    if not 0 <= drafts < max_rows:
        yield _Failure(DRAFTS_BOUNDS, 0, drafts, max_rows - 1)
    if ints[DRAFT_LIMIT] < 0:
        yield _Failure(DRAFT_LIMIT_BOUNDS, 0, ints[DRAFT_LIMIT], 0)


def _check_table(table: Sequence[int], reserved: Sequence[int], last: int, num_blocks: int) -> Iterator[_Failure]:
    for place in range(last + 1):
        block = table[place]
        if block == 0:
            yield _Failure(NULL_BLOCK, place, block, reserved[place])
        elif not 0 < block < num_blocks:
            yield _Failure(BLOCK_BOUNDS, place, block, num_blocks - 1)
        elif block != reserved[place]:
            yield _Failure(BLOCK_RESERVED, place, block, reserved[place])


def _drop(
    index: int,
    failure: _Failure,
    slots: torch.Tensor,
    active: torch.Tensor,
    num_drafts: torch.Tensor,
    slot_ints: torch.Tensor,
    check_failures: torch.Tensor,
    *,
    falls_back: bool,
) -> None:
    """Take a slot off the list. If it could have drafts it continues without them, else it ends."""
    slot = int(slots[index])
    goes_on = falls_back and int(slot_ints[slot, DRAFT_LIMIT]) > 0
    if goes_on:
        slot_ints[slot, DRAFT_LIMIT] = 0
    else:
        active[slot] = 0
    num_drafts[slot] = 0
    slots[index] = -1
    check_failures[slot] = torch.tensor([*failure, int(not goes_on)], dtype=torch.int64)


@operation(f"""
    read    lengths         int32  [max_B]
    read    paths           int32  [B, P, W]              as `gather_rows` wrote them, and below
    update  slots           int32  [B]                    -1 where a check fails; such rows are dead
    update  active          int32  [max_B]
    update  num_drafts      int32  [max_B]
    update  slot_ints       int64  [max_B, {NUM_INTS}]
    update  row_tokens      int32  [B, T]
    update  row_positions   int32  [B, T]
    update  row_live        uint8  [B, T]
    update  row_masks       int64  [B, T]
    update  dense_lens      int32  [B]
    update  num_verified    int32  [B]
    update  check_failures  int64  [max_B + 1, {WIDTH}]
""")
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
) -> None:
    """Check the rows that a step verifies, before the target runs over them; arguments as in `check_slots`.

    A row's mask must contain the row itself, no later row, and all rows of its ancestors' masks, and must agree with
    the path to the row. A dead row's mask must be 0. Without a slot only the masks are checked.
    """
    for index, slot in enumerate(slots.tolist()):
        live = [bool(each) for each in row_live[index].tolist()]
        masks = [mask & BITS for mask in row_masks[index].tolist()]
        found: list[_Failure] = []
        length = int(lengths[slot]) if slot >= 0 else 0
        if checks_lengths and slot >= 0:
            if int(dense_lens[index]) != length - 1:
                found.append(_Failure(DENSE, 0, int(dense_lens[index]), length - 1))
            count = sum(live) - 1 if live[0] else -1
            if int(num_verified[index]) != count or count < 0:
                found.append(_Failure(VERIFIED, 0, int(num_verified[index]), count))
        if checks_spans and slot >= 0:
            for row, position in enumerate(row_positions[index].tolist()):
                last = min(length - 1 + row, max_context - 1)
                if live[row] and not length - 1 <= position <= last:
                    found.append(_Failure(POSITION, row, position, last))
        if checks_masks:
            found += _check_masks(live, masks, paths[index].tolist())
        if not found:
            continue
        if slot < 0:
            check_failures[-1] = torch.tensor([*_signed(min(found)), 0], dtype=torch.int64)
        else:
            failure = _signed(min(found))
            _drop(index, failure, slots, active, num_drafts, slot_ints, check_failures, falls_back=falls_back)
        row_tokens[index].fill_(-1)
        for out in (row_positions, row_live, row_masks, dense_lens, num_verified):
            out[index] = 0


def _check_masks(live: Sequence[bool], masks: Sequence[int], paths: Sequence[Sequence[int]]) -> Iterator[_Failure]:
    """Check one slot's masks, of T rows, by its P paths; yield the failures."""
    for row, mask in enumerate(masks):
        if not live[row]:
            if mask:
                yield _Failure(MASK_DEAD, row, mask, 0)
            continue
        if not mask >> row & 1:
            yield _Failure(MASK_SELF, row, mask, 1 << row)
        if mask >> row >> 1:
            yield _Failure(MASK_BEYOND, row, mask, (2 << row) - 1)
        above = [each for each in range(row) if mask >> each & 1]
        broken = [each for each in above if not live[each] or masks[each] & ~mask]
        if broken:
            yield _Failure(MASK_CLOSED, row, mask, masks[broken[0]])
    seen = set()
    for number, path in enumerate(paths):
        expected = 0
        for column, node in enumerate(path):
            if node < 0:
                break
            known = masks[node] if node < len(masks) else 0
            expected |= 1 << (node & 63)
            seen.add(node)
            if known != expected:
                yield _Failure(MASK_PATH, number * len(path) + column, known, expected)
    for row, mask in enumerate(masks):
        if live[row] and row not in seen:
            yield _Failure(MASK_UNSEEN, row, mask, 0)


def _signed(failure: _Failure) -> _Failure:
    """Convert a failure's masks to the signed numbers that an int64 holds."""
    value, expected = ((each + (1 << 63)) % (1 << 64) - (1 << 63) for each in failure[2:])
    return _Failure(failure.code, failure.place, value, expected)


@operation(f"""
    read    accepted_nodes  int32  [B, T]                 as `accept` wrote them
    read    row_live        uint8  [B, T]
    read    row_masks       int64  [B, T]
    read    num_verified    int32  [B]
    update  slots           int32  [B]                    -1 where a check fails
    update  active          int32  [max_B]
    update  num_drafts      int32  [max_B]
    update  slot_ints       int64  [max_B, {NUM_INTS}]
    update  accepted_lens   int32  [B]                    0 where a check fails
    update  check_failures  int64  [max_B + 1, {WIDTH}]
""")
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
) -> None:
    """Check the accepted rows before anything is committed.

    A slot has at least 1 and at most its verified drafts plus the root; without a slot there are 0. The first accepted
    row must be the root, and each other one a live child of the one before.
    """
    rows = row_live.shape[1]
    for index, slot in enumerate(slots.tolist()):
        count, most = int(accepted_lens[index]), min(int(num_verified[index]), rows - 1) + 1
        failure = None
        if slot < 0 and count:
            failure = _Failure(ACCEPTED_LENGTH, index, count, 0)
        elif slot >= 0 and not 1 <= count <= most:
            failure = _Failure(ACCEPTED_LENGTH, index, count, most)
        elif slot >= 0:
            masks = [mask & BITS for mask in row_masks[index].tolist()]
            nodes, live = accepted_nodes[index, :count].tolist(), row_live[index].tolist()
            for place, node in enumerate(nodes):
                above = nodes[place - 1] if place else -1
                held = masks[above] if 0 <= above < rows else 0
                if not (0 <= node < rows and live[node] and masks[node] == held | 1 << node and above < node):
                    failure = _Failure(ACCEPTED_NODE, place, node, above)
                    break
        if failure is None:
            continue
        accepted_lens[index] = 0
        if slot < 0:
            check_failures[-1] = torch.tensor([*failure, 0], dtype=torch.int64)
        else:
            _drop(index, failure, slots, active, num_drafts, slot_ints, check_failures, falls_back=falls_back)


@operation(f"""
    read    commit_lens      int32  [B]
    read    accepted_lens    int32  [B]
    read    lengths          int32  [max_B]                     as `commit` left them
    read    ring_head        int64  [1]                         entries written so far
    update  slots            int32  [B]                         -1 where a check fails
    update  active           int32  [max_B]
    update  draft_live       uint8  [B]                         0 where a check fails, and below
    update  draft_lens       int32  [B]
    update  checked_lengths  int32  [max_B]                     the committed tokens
    update  check_failures   int64  [max_B + 1, {WIDTH}]
    update  ring_checks      int64  [R, max_B + 1, {WIDTH}]     of the entry that the step will publish
""")
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
) -> None:
    """Check the committed lengths, and write all of the step's failures to the ring, before the step is published.

    A slot that fails here ends, since its state is already wrong.
    """
    for index, slot in enumerate(slots.tolist()):
        if slot < 0 or not checks_lengths:
            continue
        count, most, length = int(commit_lens[index]), int(accepted_lens[index]), int(lengths[slot])
        expected = int(checked_lengths[slot]) + count
        if not 0 <= count <= most:
            failure = _Failure(COMMITTED_LENGTH, index, count, most)
        elif length != expected:
            failure = _Failure(ADVANCED, index, length, expected)
        else:
            checked_lengths[slot] = length
            continue
        slots[index], active[slot], draft_live[index], draft_lens[index] = -1, 0, 0, 0
        check_failures[slot] = torch.tensor([*failure, 1], dtype=torch.int64)
    ring_checks[int(ring_head) % ring_checks.shape[0]] = check_failures.to(ring_checks.device)
