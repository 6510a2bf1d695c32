"""The start of a step in one launch: apply the host's commands, list the active slots, lay out the rows to verify.

The commands and what joining slots begin with lie in pinned host memory, a microsecond away. So the rows are laid out
while the ring's tail is on its way, and once more where there are commands. It knows no request.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import int_at, long_at, set_byte, set_int, set_long, turns
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, LENGTH, MAX_LENGTH, NUM_FLOATS, NUM_INTS
from lowlat.kernels.reference.step.slots import CANCEL, COMMAND_WIDTH, JOIN, SET_DRAFT_LIMIT
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint64

__all__ = ["begin_step", "examples"]

THREADS = 512
ACTIVE, COMMITTED, DRAFTED, DEEPEST, RECORD = 0, 1, 2, 3, 4  # columns of a slot's record in shared memory
OPCODE, SLOT, VALUE, COMMAND = 0, 1, 2, 3  # of a command
WAITING = 64  # commands fetched at a time
WAITING_WORDS = WAITING * COMMAND
MAX_NODES = 10240  # of all paths: 40 KiB of shared memory


@dataclass(frozen=True)
class _Sizes:
    """The extents that the kernel is specialised by."""

    batch: int
    rows: int
    num_paths: int
    width: int
    max_batch: int
    max_rows: int
    context: int
    vocabulary: int
    table: int
    stops: int
    biases: int
    ring: int


def begin_step(
    command_ring: torch.Tensor,
    command_tail: torch.Tensor,
    staged_ints: torch.Tensor,
    staged_floats: torch.Tensor,
    staged_tokens: torch.Tensor,
    staged_table: torch.Tensor,
    staged_stop_ids: torch.Tensor,
    staged_bias_ids: torch.Tensor,
    staged_bias_values: torch.Tensor,
    drafts: torch.Tensor,
    tree_masks: torch.Tensor,
    tree_paths: torch.Tensor,
    *,
    command_head: torch.Tensor,
    slot_ints: torch.Tensor,
    slot_floats: torch.Tensor,
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    stop_ids: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    lengths: torch.Tensor,
    active: torch.Tensor,
    num_drafts: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    slots: torch.Tensor,
    row_tokens: torch.Tensor,
    row_positions: torch.Tensor,
    row_live: torch.Tensor,
    row_masks: torch.Tensor,
    paths: torch.Tensor,
    dense_lens: torch.Tensor,
    num_verified: torch.Tensor,
    verified_depth: torch.Tensor,
) -> list[KernelCall]:
    """`apply_commands`, `list_active_slots` and `gather_rows` of the reference, whose arguments these are.

    command_ring, command_tail and staged_* may lie in pinned host memory. Of a joining slot's `tokens`, the first
    LENGTH are copied and the others stay as they are: nothing reads them. At most a whole ring of commands waits.
    Time: one block; two trips over memory, and a few microseconds for each slot that joins.
    Raises ShapeError for shapes that do not fit.
    """
    widths = (array.shape[1] for array in (tokens, prompt_seen, block_table, stop_ids, bias_ids))
    extents: list[int] = [*row_tokens.shape, *tree_paths.shape[1:], *drafts.shape, *widths, command_ring.shape[0]]
    sizes = _Sizes(*extents)
    staged = (staged_ints, staged_floats, staged_tokens, staged_table, staged_stop_ids, staged_bias_ids)
    state = (slot_ints, slot_floats, tokens, block_table, stop_ids, bias_ids)
    for source, target in zip((*staged, staged_bias_values), (*state, bias_values), strict=True):
        check_shape("what is staged", source, sizes.max_batch, target.shape[1])
    for array in (lengths, active, num_drafts):
        check_shape("lengths, active and num_drafts", array, sizes.max_batch)
    for array in (slots, dense_lens, num_verified, verified_depth):
        check_shape("slots, dense_lens, num_verified and verified_depth", array, sizes.batch)
    for array in (row_positions, row_live, row_masks):
        check_shape("row_positions, row_live and row_masks", array, sizes.batch, sizes.rows)
    num_nodes = sizes.batch * sizes.num_paths * sizes.width
    if sizes.max_batch > THREADS or 32 * sizes.batch > THREADS or sizes.rows > 64 or num_nodes > MAX_NODES:
        raise ShapeError(f"begin_step takes at most {THREADS // 32} slots of 64 rows, {MAX_NODES} in paths: {sizes}")
    check_shape("command_ring", command_ring, sizes.ring, COMMAND_WIDTH)
    check_shape("paths", paths, sizes.batch, *tree_paths.shape[1:])
    check_shape("output_counts", output_counts, *prompt_seen.shape)
    commands = (command_ring, command_tail, *staged, staged_bias_values, command_head)
    updated = (*state, bias_values, lengths, active, num_drafts, prompt_seen, output_counts)
    outs = (slots, row_tokens, row_positions, row_live, row_masks, paths, dense_lens, num_verified, verified_depth)
    arguments = (*commands, *updated, drafts, tree_masks, tree_paths, *outs)
    return [KernelCall(_make(THREADS, sizes), (1, 1, 1), arguments)]


@device_function
def _load_slots(thread: Any, batch: Any, max_batch: Any, rows: Any, state: Any, shared: Any) -> None:
    """What decides the rows of each slot, into shared memory; all loads before all stores, or they would queue."""
    lengths, active, num_drafts, slot_ints = state
    record, alive, depths, _nodes = shared
    if thread < batch:
        alive[thread] = 0
        depths[thread] = 0
    if thread < max_batch:
        is_active, length, drafted = int_at(active, thread), int_at(lengths, thread), int_at(num_drafts, thread)
        limit = long_at(slot_ints, thread * NUM_INTS + DRAFT_LIMIT)
        longest = long_at(slot_ints, thread * NUM_INTS + MAX_LENGTH)
        record[thread * RECORD + ACTIVE] = is_active
        record[thread * RECORD + COMMITTED] = length
        record[thread * RECORD + DRAFTED] = max(min(min(drafted, limit), int64(rows - 1)), int64(0))
        record[thread * RECORD + DEEPEST] = max(longest - length - 1, int64(0))


@device_function
def _find(index: Any, max_batch: Any, record: Any) -> Any:
    """The slot that is the index-th active one; -1 where there is none."""
    found, rank = int64(-1), int64(0)
    for slot in range(max_batch):
        if record[slot * RECORD + ACTIVE] != 0:
            if rank == index:
                found = int64(slot)
            rank += 1
    return found


@device_function
def _lay_out_row(index: Any, row: Any, slot: Any, sizes: Any, shared: Any, arrays: Any) -> None:
    """One row: its token, position, liveness and mask; counted among the entry's live rows."""
    rows, max_rows, context = sizes
    record, alive, depths, _nodes = shared
    tokens, drafts, tree_masks, row_tokens, row_positions, row_live, row_masks = arrays
    token, position, live, mask = int64(-1), int64(0), int64(0), int64(0)
    if slot >= 0 and row <= record[slot * RECORD + DRAFTED]:
        length = record[slot * RECORD + COMMITTED]
        if row == 0:
            mask, token = int64(1), int_at(tokens, slot * context + max(length - 1, int64(0)))
        else:
            mask, token = long_at(tree_masks, slot * max_rows + row), int_at(drafts, slot * max_rows + row)
        depth = int64(cuda.popc(uint64(mask))) - 1
        if depth <= record[slot * RECORD + DEEPEST]:
            live, position = int64(1), length - 1 + depth
            cuda.atomic.or_(alive, index, int64(1) << row)
            cuda.atomic.max(depths, index, int32(depth))
        else:
            token, mask = int64(-1), int64(0)
    place = index * rows + row
    set_int(row_tokens, place, token)
    set_int(row_positions, place, position)
    set_byte(row_live, place, live)
    set_long(row_masks, place, mask)


@device_function
def _keep_paths(index: Any, lane: Any, slot: Any, count: Any, early: Any, source: Any, nodes: Any) -> None:
    """An entry's paths into shared memory, by a warp; `early` is what the first turn has loaded already."""
    if lane < count:
        nodes[index * count + lane] = early
    for turn in range(1, turns(count, 32)):
        place = lane + turn * 32
        if slot >= 0 and place < count:
            nodes[index * count + place] = int_at(source, slot * count + place)


@device_function
def _lay_out_path(first: Any, slot: Any, width: Any, live: Any, nodes: Any, out: Any) -> None:
    """One path up to its first dead node, and the root in any case.

    first  where the path begins, in shared memory and in the output
    live   the bits of the entry's live rows
    """
    going = slot >= 0
    for place in range(width):
        node = int64(nodes[first + place])
        going = going and node >= 0 and node < 64 and (live >> (node & 63)) & 1 == 1 and (place == 0 or node != 0)
        known = node if going else int64(-1)
        if place == 0 and slot >= 0:
            known = int64(0)
        set_int(out, first + place, known)


@device_function
def _commands_wait(thread: Any, head: Any, tail: Any, words: Any) -> Any:
    """Tell all threads what the first knows: head and tail, as the first two words; whether they differ."""
    if thread == 0:
        if head != tail:
            ptx.fence_system()
        words[0] = head
        words[1] = tail
    cuda.syncthreads()
    return words[0] != words[1]


@device_function
def _copy_row(thread: Any, threads: Any, slot: Any, num_words: Any, source: Any, target: Any) -> None:
    """Copy a slot's row of 32-bit words."""
    place = thread
    while place < num_words:
        set_int(target, slot * num_words + place, int_at(source, slot * num_words + place))
        place += threads


@device_function
def _keep_token(slot: Any, place: Any, end: Any, token: Any, context: Any, vocabulary: Any, arrays: Any) -> None:
    tokens, prompt_seen = arrays
    if place < end:
        set_int(tokens, slot * context + place, token)
        if token >= 0 and token < vocabulary:
            set_byte(prompt_seen, slot * vocabulary + token, 1)


@device_function
def _join_tokens(thread: Any, threads: Any, slot: Any, end: Any, sizes: Any, staged: Any, arrays: Any) -> None:
    """Copy and mark the tokens of the prompt: four loads at a time, because each takes a trip over the bus."""
    context, vocabulary = sizes
    first, place = slot * context, thread
    while place < end:
        second, third, fourth = place + threads, place + threads * 2, place + threads * 3
        a, b = int_at(staged, first + place), int_at(staged, first + min(second, end - 1))
        c, d = int_at(staged, first + min(third, end - 1)), int_at(staged, first + min(fourth, end - 1))
        _keep_token(slot, place, end, a, context, vocabulary, arrays)
        _keep_token(slot, second, end, b, context, vocabulary, arrays)
        _keep_token(slot, third, end, c, context, vocabulary, arrays)
        _keep_token(slot, fourth, end, d, context, vocabulary, arrays)
        place += threads * 4


@device_function
def _join(thread: Any, threads: Any, slot: Any, extents: Any, staged: Any, joined: Any, counts: Any) -> None:
    """Copy what is staged for a slot and forget its last request, by all threads."""
    context, vocabulary, table, stops, biases = extents
    _copy_row(thread, threads, slot, 2 * NUM_INTS, staged[0], joined[0])
    _copy_row(thread, threads, slot, NUM_FLOATS, staged[1], joined[1])
    _copy_row(thread, threads, slot, table, staged[3], joined[3])
    _copy_row(thread, threads, slot, stops, staged[4], joined[4])
    _copy_row(thread, threads, slot, biases, staged[5], joined[5])
    _copy_row(thread, threads, slot, biases, staged[6], joined[6])
    prompt_seen, output_counts = counts
    token = thread
    while token < vocabulary:
        set_byte(prompt_seen, slot * vocabulary + token, 0)
        set_int(output_counts, slot * vocabulary + token, 0)
        token += threads
    cuda.syncthreads()
    end = min(long_at(joined[0], slot * NUM_INTS + LENGTH), int64(context))
    _join_tokens(thread, threads, slot, end, (context, vocabulary), staged[2], (joined[2], prompt_seen))


@device_function
def _set_slot(opcode: Any, slot: Any, value: Any, state: Any) -> None:
    """What a command changes beside the rows that a join copies; by one thread."""
    lengths, active, num_drafts, slot_ints = state
    if opcode == SET_DRAFT_LIMIT:
        set_long(slot_ints, slot * NUM_INTS + DRAFT_LIMIT, value)
    elif opcode in (JOIN, CANCEL):
        set_int(active, slot, 1 if opcode == JOIN else 0)
        set_int(num_drafts, slot, 0)
        if opcode == JOIN:
            set_int(lengths, slot, long_at(slot_ints, slot * NUM_INTS + LENGTH))


@device_function
def _apply(
    thread: Any, threads: Any, ring: Any, extents: Any, words: Any, source: Any, rows: Any, state: Any, counts: Any
) -> None:
    """All commands, in order; head and tail are the first two words at first."""
    staged, joined = rows
    head, tail = words[0], words[1]
    while head < tail:
        cuda.syncthreads()
        if thread < WAITING and head + thread < tail:
            entry = (head + thread) % ring * COMMAND_WIDTH
            opcode, slot, value = long_at(source, entry), long_at(source, entry + 1), long_at(source, entry + 2)
            words[thread * COMMAND + OPCODE] = opcode
            words[thread * COMMAND + SLOT] = slot
            words[thread * COMMAND + VALUE] = value
        cuda.syncthreads()
        count = min(tail - head, int64(WAITING))
        for number in range(count):
            opcode, slot = words[number * COMMAND + OPCODE], words[number * COMMAND + SLOT]
            if opcode == JOIN:
                _join(thread, threads, slot, extents, staged, joined, counts)
            if thread == 0:
                _set_slot(opcode, slot, words[number * COMMAND + VALUE], state)
            cuda.syncthreads()
        head += count


@device_function
def _lay_out(thread: Any, plan: Any, state: Any, shared: Any, row_arrays: Any, path_arrays: Any, outs: Any) -> None:
    """List the active slots and lay out their rows and paths: a warp an entry."""
    batch, rows, num_paths, width, max_batch, max_rows, context = plan
    record, alive, depths, nodes = shared
    tree_paths, paths = path_arrays
    slots, dense_lens, num_verified, verified_depth = outs
    _load_slots(thread, batch, max_batch, rows, state, shared)
    cuda.syncthreads()
    index, lane, slot = thread >> 5, thread & 31, int64(-1)
    if index < batch:
        slot = _find(index, max_batch, record)
        count, early = num_paths * width, int64(-1)
        if slot >= 0:
            early = int_at(tree_paths, slot * count + min(lane, int64(count - 1)))
        for turn in range(turns(rows, 32)):
            row = lane + turn * 32
            if row < rows:
                _lay_out_row(index, row, slot, (rows, max_rows, context), shared, row_arrays)
        _keep_paths(index, lane, slot, count, early, tree_paths, nodes)
    cuda.syncthreads()
    if index < batch:
        live = alive[index]
        for turn in range(turns(num_paths, 32)):
            path = lane + turn * 32
            if path < num_paths:
                _lay_out_path((index * num_paths + path) * width, slot, width, live, nodes, paths)
        if lane == 0:
            set_int(slots, index, slot)
            set_int(dense_lens, index, record[slot * RECORD + COMMITTED] - 1 if slot >= 0 else int64(0))
            set_int(num_verified, index, int64(cuda.popc(uint64(live))) - 1 if slot >= 0 else int64(0))
            set_int(verified_depth, index, depths[index])


@cache
def _make(threads: int, sizes: _Sizes) -> Kernel:
    plan, extents, ring = astuple(sizes)[:7], astuple(sizes)[6:11], sizes.ring
    batch, num_records, num_nodes = sizes.batch, sizes.max_batch * RECORD, sizes.batch * sizes.num_paths * sizes.width

    def kernel(
        command_ring: Any,
        command_tail: Any,
        staged_ints: Any,
        staged_floats: Any,
        staged_tokens: Any,
        staged_table: Any,
        staged_stop_ids: Any,
        staged_bias_ids: Any,
        staged_bias_values: Any,
        command_head: Any,
        slot_ints: Any,
        slot_floats: Any,
        tokens: Any,
        block_table: Any,
        stop_ids: Any,
        bias_ids: Any,
        bias_values: Any,
        lengths: Any,
        active: Any,
        num_drafts: Any,
        prompt_seen: Any,
        output_counts: Any,
        drafts: Any,
        tree_masks: Any,
        tree_paths: Any,
        slots: Any,
        row_tokens: Any,
        row_positions: Any,
        row_live: Any,
        row_masks: Any,
        paths: Any,
        dense_lens: Any,
        num_verified: Any,
        verified_depth: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        record = cuda.shared.array(shape=num_records, dtype=int64)
        alive = cuda.shared.array(shape=batch, dtype=int64)
        depths = cuda.shared.array(shape=batch, dtype=int32)
        nodes = cuda.shared.array(shape=num_nodes, dtype=int32)
        words = cuda.shared.array(shape=WAITING_WORDS, dtype=int64)
        thread = int64(cuda.threadIdx.x)
        head, tail = int64(0), int64(0)
        if thread == 0:
            tail, head = ptx.load_volatile_i64(command_tail), long_at(command_head, 0)
        state, shared = (lengths, active, num_drafts, slot_ints), (record, alive, depths, nodes)
        row_arrays = (tokens, drafts, tree_masks, row_tokens, row_positions, row_live, row_masks)
        outs = (slots, dense_lens, num_verified, verified_depth)
        _lay_out(thread, plan, state, shared, row_arrays, (tree_paths, paths), outs)
        if _commands_wait(thread, head, tail, words):
            staged = (staged_ints, staged_floats, staged_tokens, staged_table, staged_stop_ids, staged_bias_ids)
            joined = (slot_ints, slot_floats, tokens, block_table, stop_ids, bias_ids, bias_values)
            rows_joined, counts = ((*staged, staged_bias_values), joined), (prompt_seen, output_counts)
            _apply(thread, threads, ring, extents, words, command_ring, rows_joined, state, counts)
            if thread == 0:
                set_long(command_head, 0, tail)
            _lay_out(thread, plan, state, shared, row_arrays, (tree_paths, paths), outs)

    name = "begin_step_" + "_".join(str(extent) for extent in (threads, *astuple(sizes)))
    return Kernel(name, kernel, (types.int64,) * 34, threads)


def examples() -> list[Kernel]:
    """What CI compiles: a chain's bucket, and a tree's."""
    chain = _Sizes(1, 4, 1, 4, 4, 8, 8192, 128256, 513, 32, 300, 64)
    tree = _Sizes(8, 64, 42, 8, 8, 64, 32768, 201088, 2052, 32, 300, 64)
    return [_make(THREADS, chain), _make(THREADS, tree)]
