"""This module has the kernel of a step's start, of one block.

It applies commands, lists active slots, lays out the rows to verify, and publishes them. If each step chooses its draft
length, the same block chooses it; or it first stores the drafts that the step verifies in state.

The commands and the first state of joining slots are in pinned host memory, a microsecond away. So the rows are laid
out while the ring's tail is being read, and again if there are commands. A step may have been launched before the host
has read the previous one's results. If it verifies drafts, a slot with a grammar waits for the host's forced tokens.
The kernel is specialised by a `BeginStepPlan`.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.host_word import await_host
from lowlat.kernels.common.memory import divide, int_at, long_at, set_byte, set_int, set_long, turns
from lowlat.kernels.reference.step.slot_record import (
    DRAFT_LIMIT,
    HAS_GRAMMAR,
    MASKED,
    MAX_LENGTH,
    NUM_INTS,
)
from lowlat.kernels.reference.step.slots import (
    FORCED_DRAFTS,
    FROM_METHOD,
    FROM_TEXT,
    MAX_FORCED,
    MAX_PATHS,
    NO_SOURCE,
)
from lowlat.kernels.speculation.choose_draft_length import BODY, CHOICE_WORDS, ChoicePlan, choose, load_choice
from lowlat.kernels.step.host_commands import WAITING_WORDS, apply_waiting, commands_wait
from lowlat.kernels.step.next_drafts import hand_over
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, plan_name
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint64

__all__ = ["ARGUMENTS", "BeginStepPlan", "begin_step_kernel"]

ARGUMENTS = (
    *("command_ring", "command_tail", "staged_ints", "staged_floats", "staged_tokens", "staged_table"),
    *("staged_stop_ids", "staged_bias_ids", "staged_bias_values", "command_head", "slot_ints", "slot_floats"),
    *("tokens", "block_table", "stop_ids", "bias_ids", "bias_values", "lengths", "active", "num_drafts"),
    *("prompt_seen", "output_counts", "drafts", "tree_masks", "tree_paths", "slots", "row_tokens", "row_positions"),
    *("row_live", "row_masks", "paths", "dense_lens", "num_verified", "verified_depth", "verified_source"),
    *("draft_sources", "grammar_forced", "grammar_decided", "grammar_tokens", "grammar_paths", "grammar_lengths"),
    *("draft_nodes", "draft_live", "topology_masks", "topology_paths"),
    *(
        "extended",
        "length_bounds",
        "draft_length_costs",
        "length_expected",
        "length_last",
        "length_waited",
        "draft_length_choice",
    ),
    "condition",
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
NO_CHOICE = ChoicePlan(0, 0, 0, 0)


@dataclass(frozen=True)
class BeginStepPlan:
    """The extents and operations that the kernel is specialised by; extents of operations that it lacks are 1.

    applies, lists, gathers, tells  its operations: `apply_commands`, `list_active_slots`, `gather_rows`, `publish_rows`
    known_paths, known_length        of the topology's paths: `tree_masks` is done first; 0: it is not
    most_drafts                     a step that was chosen to draft up to so many is not told of; 0: all are
    choice                          that of `choose_draft_length`, of which most is 0 where nothing is chosen
    nodes                           of a slot in `draft_nodes`, of which the topology has the first
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
    known_paths: int = 0
    known_length: int = 0
    most_drafts: int = 0
    choice: ChoicePlan = NO_CHOICE
    nodes: int = 0

    @property
    def path_sizes(self) -> tuple[int, int, int, int]:
        """The extents of a slot's paths, and of the topology's."""
        return self.num_paths, self.width, self.known_paths, self.known_length


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
def _source_of(verified: Any, chained: Any, from_text: Any) -> Any:
    """The source of what an entry verifies."""
    source = int64(FROM_TEXT) if from_text != 0 else int64(FROM_METHOD)
    source = int64(FORCED_DRAFTS) if chained > 0 else source
    return source if verified > 0 else int64(NO_SOURCE)


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
def _lay_out(
    thread: Any, plan: Any, parts: Any, state: Any, shared: Any, row_arrays: Any, path_arrays: Any, outs: Any
) -> Any:
    """List the active slots, or take those that are listed, and lay out their rows and paths: a warp an entry, whose
    slot it returns."""
    batch, rows, num_paths, width, max_batch, max_rows, context = plan
    lists, gathers, _tells = parts
    record, alive, depths, nodes, forced, others = shared
    tree_paths, paths, grammar_forced, grammar_decided, draft_sources = path_arrays
    slots, dense_lens, num_verified, verified_depth, verified_source = outs
    chained, from_text = int64(0), int64(0)
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
        count, early = num_paths * width, int64(-1)
        if int64(cuda.popc(uint64(others[index]))) == min(num_paths, MAX_PATHS):
            chained = _count_forced(index, slot, width, record, forced)
        if slot >= 0:
            early = int_at(tree_paths, slot * count + min(lane, int64(count - 1)))
            from_text = int_at(draft_sources, slot)
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
            verified = int64(cuda.popc(uint64(live))) - 1 if slot >= 0 else int64(0)
            set_int(num_verified, index, verified)
            set_int(verified_source, index, _source_of(verified, chained, from_text))
            set_int(verified_depth, index, depths[index])
    if index < batch and lists and lane == 0:
        set_int(slots, index, slot)
    return slot


@device_function
def _tell_rows(thread: Any, slot: Any, sizes: Any, record: Any, rows_of: Any, told: Any) -> None:
    """The rows of a slot with a grammar to the host: a warp an entry, its length after all else."""
    rows, max_rows = sizes
    row_tokens, row_masks = rows_of
    tokens, paths, lengths = told
    index, lane = thread >> 5, thread & 31
    guided = slot >= 0 and record[slot * RECORD + GUIDED] == MASKED
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
    rows, num_forced, lays_out = plan.rows, plan.batch * FORCED_WORDS, plan.lists or plan.gathers or plan.tells
    sizes, extents, ring, threads = astuple(plan)[:7], astuple(plan)[6:11], plan.ring, plan.threads
    batch, num_records, num_nodes = plan.batch, plan.max_batch * RECORD, plan.batch * plan.num_paths * plan.width
    applies, tells, parts = plan.applies, plan.tells, (plan.lists, plan.gathers, plan.tells)
    hands, path_sizes, num_drafted = plan.known_paths > 0, plan.path_sizes, max(num_nodes, batch * rows)
    choice, chooses, choice_sizes = astuple(plan.choice), plan.choice.most > 0, astuple(plan.choice)[:3]
    num_costs, num_expected, num_handed = plan.choice.num_costs, max(plan.choice.num_expected, 1), plan.nodes
    num_facts, num_totals, most_drafts = max(plan.choice.num_facts, 1), plan.choice.num_totals, plan.most_drafts

    def kernel(
        command_ring: Any, command_tail: Any, staged_ints: Any, staged_floats: Any, staged_tokens: Any,
        staged_table: Any, staged_stop_ids: Any, staged_bias_ids: Any, staged_bias_values: Any, command_head: Any,
        slot_ints: Any, slot_floats: Any, tokens: Any, block_table: Any, stop_ids: Any, bias_ids: Any,
        bias_values: Any, lengths: Any, active: Any, num_drafts: Any, prompt_seen: Any, output_counts: Any,
        drafts: Any, tree_masks: Any, tree_paths: Any, slots: Any, row_tokens: Any, row_positions: Any, row_live: Any,
        row_masks: Any, paths: Any, dense_lens: Any, num_verified: Any, verified_depth: Any, verified_source: Any,
        draft_sources: Any, grammar_forced: Any, grammar_decided: Any, grammar_tokens: Any, grammar_paths: Any,
        grammar_lengths: Any, draft_nodes: Any, draft_live: Any, topology_masks: Any, topology_paths: Any,
        extended: Any, length_bounds: Any, draft_length_costs: Any, length_expected: Any, length_last: Any,
        length_waited: Any, draft_length_choice: Any, condition: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        record = cuda.shared.array(shape=num_records, dtype=int64)
        alive = cuda.shared.array(shape=batch, dtype=int64)
        depths = cuda.shared.array(shape=batch, dtype=int32)
        nodes = cuda.shared.array(shape=num_drafted, dtype=int32)
        forced = cuda.shared.array(shape=num_forced, dtype=int32)
        others = cuda.shared.array(shape=batch, dtype=int64)
        words = cuda.shared.array(shape=WAITING_WORDS, dtype=int64)
        facts = cuda.shared.array(shape=num_facts, dtype=int64)
        expected = cuda.shared.array(shape=num_expected, dtype=int64)
        costs = cuda.shared.array(shape=num_costs, dtype=int64)
        chosen = cuda.shared.array(shape=CHOICE_WORDS, dtype=int64)
        totals = cuda.shared.array(shape=num_totals, dtype=int64)
        thread, slot, head, tail = int64(cuda.threadIdx.x), int64(-1), int64(0), int64(0)
        least, greatest = int64(0), int64(0)
        if applies and thread == 0:
            tail, head = ptx.load_volatile_i64(command_tail), long_at(command_head, 0)
        if chooses and thread == 0:
            least, greatest = int_at(length_bounds, 0), int_at(length_bounds, 1)
        state, shared = (lengths, active, num_drafts, slot_ints), (record, alive, depths, nodes, forced, others)
        row_arrays = (tokens, drafts, tree_masks, row_tokens, row_positions, row_live, row_masks)
        path_arrays = (tree_paths, paths, grammar_forced, grammar_decided, draft_sources)
        outs = (slots, dense_lens, num_verified, verified_depth, verified_source)
        topology = (topology_masks, topology_paths)
        known, judged = (
            (draft_length_costs, length_expected, length_last, length_waited),
            (facts, expected, costs, chosen),
        )
        facts_of = (active, lengths, extended, slot_ints, *known)
        if hands:
            handed, targets = (slots, draft_live, draft_nodes, *topology), (drafts, tree_masks, tree_paths, num_drafts)
            drafts_sizes = (batch, rows, sizes[5], num_handed)
            hand_over(thread, threads, drafts_sizes, path_sizes, handed, targets, (nodes, others, depths))
        if chooses:
            load_choice(thread, threads, choice_sizes, facts_of, judged)
        if lays_out:
            slot = _lay_out(thread, sizes, parts, state, shared, row_arrays, path_arrays, outs)
        if applies and commands_wait(thread, head, tail, words):
            staged = (staged_ints, staged_floats, staged_tokens, staged_table, staged_stop_ids, staged_bias_ids)
            joined = (slot_ints, slot_floats, tokens, block_table, stop_ids, bias_ids, bias_values)
            given, counts = ((*staged, staged_bias_values), joined), (prompt_seen, output_counts)
            apply_waiting(thread, threads, ring, extents, words, (command_ring, command_head), given, state, counts)
            if chooses:
                load_choice(thread, threads, choice_sizes, facts_of, judged)
            if lays_out:
                slot = _lay_out(thread, sizes, parts, state, shared, row_arrays, path_arrays, outs)
        if chooses:
            updated = (length_last, length_waited, draft_length_choice)
            choose(thread, choice, (least, greatest), judged, totals, updated, condition)
        if tells:
            told, width = (grammar_tokens, grammar_paths, grammar_lengths), int64(0)
            if most_drafts > 0:  # of a step with drafts rows are told when those are made
                width = chosen[BODY] if chooses else int_at(draft_length_choice, 0)
            slot = int64(-1) if width >= 1 and width <= most_drafts else slot
            _tell_rows(thread, slot, (rows, sizes[5]), record, (row_tokens, row_masks), told)

    name = plan_name("begin_step", plan)
    signature = (*[types.int64] * (len(ARGUMENTS) - 2), types.uint64, types.uint64)
    return Kernel(name, kernel, signature, threads, linked=not plan.choice.switching)
