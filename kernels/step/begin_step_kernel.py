"""The kernel of a step's start: one block applies commands, lists active slots, lays out the rows to verify, and tells.

The commands and what joining slots begin with lie in pinned host memory, a microsecond away. So the rows are laid out
while the ring's tail is on its way, and once more where there are commands. A step may have been launched before the
host has read the one ahead of it: where it verifies drafts, a slot with a grammar waits for what the host forces. It is
specialised by a `BeginStepPlan`.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.host_word import await_host
from lowlat.kernels.common.memory import divide, int_at, long_at, set_byte, set_int, set_long, turns
from lowlat.kernels.reference.step.slot_record import (
    DRAFT_LIMIT,
    HAS_GRAMMAR,
    LENGTH,
    MAX_LENGTH,
    NUM_FLOATS,
    NUM_INTS,
)
from lowlat.kernels.reference.step.slots import CANCEL, COMMAND_WIDTH, JOIN, MAX_FORCED, MAX_PATHS, SET_DRAFT_LIMIT
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint64

__all__ = ["ARGUMENTS", "BeginStepPlan", "begin_step_kernel"]

ARGUMENTS = (
    *("command_ring", "command_tail", "staged_ints", "staged_floats", "staged_tokens", "staged_table"),
    *("staged_stop_ids", "staged_bias_ids", "staged_bias_values", "command_head", "slot_ints", "slot_floats"),
    *("tokens", "block_table", "stop_ids", "bias_ids", "bias_values", "lengths", "active", "num_drafts"),
    *("prompt_seen", "output_counts", "drafts", "tree_masks", "tree_paths", "slots", "row_tokens", "row_positions"),
    *("row_live", "row_masks", "paths", "dense_lens", "num_verified", "verified_depth"),
    *("grammar_forced", "grammar_decided", "grammar_tokens", "grammar_paths", "grammar_lengths"),
)
ACTIVE, COMMITTED, DRAFTED, DEEPEST, GUIDED, LIMIT, RECORD = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
)  # columns of a slot's record in shared memory
FORCED_WORDS = MAX_FORCED + 1  # of an entry: a count, then tokens
OPCODE, SLOT, VALUE, COMMAND = 0, 1, 2, 3  # of a command
WAITING = 64  # commands fetched at a time
WAITING_WORDS = WAITING * COMMAND


@dataclass(frozen=True)
class BeginStepPlan:
    """The extents and operations that the kernel is specialised by; extents of operations that it lacks are 1.

    applies, lists, gathers, tells  its operations: `apply_commands`, `list_active_slots`, `gather_rows`, `publish_rows`
    """

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
    threads: int
    applies: bool
    lists: bool
    gathers: bool
    tells: bool


@device_function
def _load_slots(thread: Any, batch: Any, max_batch: Any, rows: Any, parts: Any, state: Any, shared: Any) -> None:
    """Copy each slot's state to shared memory; all loads before all stores, or they would queue."""
    lists, gathers, tells = parts
    lengths, active, num_drafts, slot_ints = state
    record, alive, depths, _nodes, forced, others = shared
    if thread < batch:
        forced[thread * FORCED_WORDS] = 0
        others[thread] = 0
        alive[thread] = 0
        depths[thread] = 0
    if thread < max_batch:
        is_active, length, drafted, limit, longest = int64(0), int64(0), int64(0), int64(0), int64(0)
        guided = int64(0)
        if lists:
            is_active = int_at(active, thread)
        if gathers:
            length, drafted = int_at(lengths, thread), int_at(num_drafts, thread)
            limit = long_at(slot_ints, thread * NUM_INTS + DRAFT_LIMIT)
            longest = long_at(slot_ints, thread * NUM_INTS + MAX_LENGTH)
        if tells:
            length = int_at(lengths, thread)
        if gathers or tells:
            guided = long_at(slot_ints, thread * NUM_INTS + HAS_GRAMMAR)
        record[thread * RECORD + GUIDED] = guided
        record[thread * RECORD + ACTIVE] = is_active
        record[thread * RECORD + COMMITTED] = length
        record[thread * RECORD + DRAFTED] = max(min(min(drafted, limit), int64(rows - 1)), int64(0))
        record[thread * RECORD + LIMIT] = min(limit, int64(rows - 1))
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
def _load_forced(lane: Any, index: Any, slot: Any, max_rows: Any, source: Any, forced: Any) -> None:
    """The tokens that an entry's grammar forces, from the host's memory, by a warp."""
    if lane < max_rows:
        forced[index * FORCED_WORDS + lane] = ptx.load_volatile_i32(source + (slot * max_rows + lane) * 4)


@device_function
def _count_forced(index: Any, slot: Any, width: Any, record: Any, forced: Any) -> Any:
    """The tokens that an entry's grammar forces and that its step may verify."""
    most = min(min(int64(forced[index * FORCED_WORDS]), int64(MAX_FORCED)), int64(width - 1))
    return max(min(most, record[slot * RECORD + LIMIT]), int64(0)) if slot >= 0 else int64(0)


@device_function
def _compare_forced(lane: Any, index: Any, slot: Any, sizes: Any, shared: Any, drafts: Any, paths: Any) -> None:
    """The bits of the paths whose drafts are others than an entry's grammar forces, by a warp."""
    num_paths, width, max_rows = sizes
    record, forced, others = shared
    count = _count_forced(index, slot, width, record, forced)
    for turn in range(turns(num_paths * width, 32)):
        place = lane + turn * 32
        path, column = divide(place, width)
        if path < min(num_paths, MAX_PATHS) and 0 < column <= count:
            node, token = int_at(paths, slot * (num_paths * width) + place), int64(-1)
            if 0 < node <= record[slot * RECORD + DRAFTED]:
                token = int_at(drafts, slot * max_rows + node)
            if token != forced[index * FORCED_WORDS + column]:
                cuda.atomic.or_(others, index, int64(1) << path)


@device_function
def _lay_out_row(index: Any, row: Any, slot: Any, chained: Any, sizes: Any, shared: Any, arrays: Any) -> None:
    """One row: its token, position, liveness and mask; counted among the entry's live rows.

    chained  drafts that its grammar forces, which stand in place of others; 0: none
    """
    rows, max_rows, context = sizes
    record, alive, depths, _nodes, forced, _others = shared
    tokens, drafts, tree_masks, row_tokens, row_positions, row_live, row_masks = arrays
    token, position, live, mask = int64(-1), int64(0), int64(0), int64(0)
    drafted = int64(0)
    if slot >= 0:
        drafted = chained if chained > 0 else int64(record[slot * RECORD + DRAFTED])
    if slot >= 0 and row <= drafted:
        length = record[slot * RECORD + COMMITTED]
        if row == 0:
            mask, token = int64(1), int_at(tokens, slot * context + max(length - 1, int64(0)))
        elif chained > 0:
            mask, token = (int64(2) << row) - 1, int64(forced[index * FORCED_WORDS + row])
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
def _keep_paths(
    index: Any, lane: Any, slot: Any, chained: Any, sizes: Any, early: Any, source: Any, nodes: Any
) -> None:
    """An entry's paths into shared memory, by a warp; `early` is what the first turn has loaded already.

    chained  whether the first path is a chain of forced drafts, and the only one
    """
    count, width = sizes
    if lane < count:
        nodes[index * count + lane] = early
    for turn in range(1, turns(count, 32)):
        place = lane + turn * 32
        if slot >= 0 and place < count:
            nodes[index * count + place] = int_at(source, slot * count + place)
    if chained:
        for turn in range(turns(count, 32)):
            place = lane + turn * 32
            if place < count:
                nodes[index * count + place] = place if place < width else int64(-1)


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
    """A command's changes beside the rows that a join copies; by one thread."""
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
def _lay_out(
    thread: Any, plan: Any, parts: Any, state: Any, shared: Any, row_arrays: Any, path_arrays: Any, outs: Any
) -> Any:
    """List the active slots, or take those that are listed, and lay out their rows and paths: a warp an entry, whose
    slot it returns."""
    batch, rows, num_paths, width, max_batch, max_rows, context = plan
    lists, gathers, _tells = parts
    record, alive, depths, nodes, forced, others = shared
    tree_paths, paths, grammar_forced, grammar_decided = path_arrays
    slots, dense_lens, num_verified, verified_depth = outs
    _load_slots(thread, batch, max_batch, rows, parts, state, shared)
    cuda.syncthreads()
    index, lane, slot = thread >> 5, thread & 31, int64(-1)
    if index < batch:
        slot = _find(index, max_batch, record) if lists else int_at(slots, index)
    place = max(slot, int64(0)) * RECORD
    guided = gathers and rows > 1 and slot >= 0 and record[place + GUIDED] != 0
    if guided and lane == 0:
        await_host(grammar_decided + slot * 8, record[place + COMMITTED])
    cuda.syncthreads()
    if guided:
        _load_forced(lane, index, slot, max_rows, grammar_forced, forced)
    cuda.syncthreads()
    if guided:
        compared, places = (record, forced, others), (num_paths, width, max_rows)
        _compare_forced(lane, index, slot, places, compared, row_arrays[1], tree_paths)
    cuda.syncthreads()
    if index < batch and gathers:
        count, early, chained = num_paths * width, int64(-1), int64(0)
        if int64(cuda.popc(uint64(others[index]))) == min(num_paths, MAX_PATHS):
            chained = _count_forced(index, slot, width, record, forced)
        if slot >= 0:
            early = int_at(tree_paths, slot * count + min(lane, int64(count - 1)))
        for turn in range(turns(rows, 32)):
            row = lane + turn * 32
            if row < rows:
                _lay_out_row(index, row, slot, chained, (rows, max_rows, context), shared, row_arrays)
        _keep_paths(index, lane, slot, chained > 0, (count, width), early, tree_paths, nodes)
    cuda.syncthreads()
    if index < batch and gathers:
        live = alive[index]
        for turn in range(turns(num_paths, 32)):
            path = lane + turn * 32
            if path < num_paths:
                _lay_out_path((index * num_paths + path) * width, slot, width, live, nodes, paths)
        if lane == 0:
            set_int(dense_lens, index, record[slot * RECORD + COMMITTED] - 1 if slot >= 0 else int64(0))
            set_int(num_verified, index, int64(cuda.popc(uint64(live))) - 1 if slot >= 0 else int64(0))
            set_int(verified_depth, index, depths[index])
    if index < batch and lists and lane == 0:
        set_int(slots, index, slot)
    return slot


@device_function
def _tell_rows(thread: Any, slot: Any, sizes: Any, record: Any, rows_of: Any, told: Any) -> None:
    """The rows of a slot with a grammar to the host: a warp an entry, its length behind all else."""
    rows, max_rows = sizes
    row_tokens, row_masks = rows_of
    tokens, paths, lengths = told
    index, lane = thread >> 5, thread & 31
    guided = slot >= 0 and record[slot * RECORD + GUIDED] != 0
    if guided:
        for turn in range(turns(max_rows, 32)):
            row, token, path = lane + turn * 32, int64(-1), int64(0)
            if row < rows:  # the same lane has laid it out
                token, path = int_at(row_tokens, index * rows + row), long_at(row_masks, index * rows + row)
            if row < max_rows:
                set_int(tokens, slot * max_rows + row, token)
                set_long(paths, slot * max_rows + row, path)
    cuda.syncthreads()
    if guided and lane == 0:
        ptx.store_release_system(lengths + slot * 8, record[slot * RECORD + COMMITTED])


@cache
def begin_step_kernel(plan: BeginStepPlan) -> Kernel:
    """The kernel for a plan; arguments are addresses, zero for those of operations that it lacks."""
    rows, max_rows, num_forced = plan.rows, plan.max_rows, plan.batch * FORCED_WORDS
    sizes, extents, ring, threads = astuple(plan)[:7], astuple(plan)[6:11], plan.ring, plan.threads
    batch, num_records, num_nodes = plan.batch, plan.max_batch * RECORD, plan.batch * plan.num_paths * plan.width
    applies, tells, parts = plan.applies, plan.tells, (plan.lists, plan.gathers, plan.tells)
    lays_out = any(parts)

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
        grammar_forced: Any,
        grammar_decided: Any,
        grammar_tokens: Any,
        grammar_paths: Any,
        grammar_lengths: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        record = cuda.shared.array(shape=num_records, dtype=int64)
        alive = cuda.shared.array(shape=batch, dtype=int64)
        depths = cuda.shared.array(shape=batch, dtype=int32)
        nodes = cuda.shared.array(shape=num_nodes, dtype=int32)
        forced = cuda.shared.array(shape=num_forced, dtype=int32)
        others = cuda.shared.array(shape=batch, dtype=int64)
        words = cuda.shared.array(shape=WAITING_WORDS, dtype=int64)
        thread, slot, head, tail = int64(cuda.threadIdx.x), int64(-1), int64(0), int64(0)
        if applies and thread == 0:
            tail, head = ptx.load_volatile_i64(command_tail), long_at(command_head, 0)
        state, shared = (lengths, active, num_drafts, slot_ints), (record, alive, depths, nodes, forced, others)
        row_arrays = (tokens, drafts, tree_masks, row_tokens, row_positions, row_live, row_masks)
        path_arrays = (tree_paths, paths, grammar_forced, grammar_decided)
        outs = (slots, dense_lens, num_verified, verified_depth)
        if lays_out:
            slot = _lay_out(thread, sizes, parts, state, shared, row_arrays, path_arrays, outs)
        if applies and _commands_wait(thread, head, tail, words):
            staged = (staged_ints, staged_floats, staged_tokens, staged_table, staged_stop_ids, staged_bias_ids)
            joined = (slot_ints, slot_floats, tokens, block_table, stop_ids, bias_ids, bias_values)
            rows_joined, counts = ((*staged, staged_bias_values), joined), (prompt_seen, output_counts)
            _apply(thread, threads, ring, extents, words, command_ring, rows_joined, state, counts)
            if thread == 0:
                set_long(command_head, 0, tail)
            if lays_out:
                slot = _lay_out(thread, sizes, parts, state, shared, row_arrays, path_arrays, outs)
        if tells:
            told = (grammar_tokens, grammar_paths, grammar_lengths)
            _tell_rows(thread, slot, (rows, max_rows), record, (row_tokens, row_masks), told)

    name = "begin_step_" + "_".join(str(extent) for extent in astuple(plan))
    return Kernel(name, kernel, (types.int64,) * len(ARGUMENTS), threads)
