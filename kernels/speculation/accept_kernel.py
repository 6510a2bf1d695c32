"""This module has the kernel of acceptance and commit: a block a slot, a thread a row and a path.

All inputs are in shared memory. It is specialised by an `AcceptPlan`. Arrays are passed as addresses.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, int_at, long_at, set_byte, set_int, turns
from lowlat.kernels.common.philox import philox, uniform
from lowlat.kernels.reference.speculation.accept import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, SIMULATION_STREAM
from lowlat.kernels.reference.step.slot_record import MAX_LENGTH, NUM_INTS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32, uint64

__all__ = ["ARGUMENTS", "MAX_PATHS", "MAX_ROWS", "AcceptPlan", "accept_kernel"]

MAX_ROWS = 64
ARGUMENTS = (
    *("target_tokens", "draft_tokens", "paths", "finite", "slots", "lengths", "slot_ints", "stop_ids", "dense_lens"),
    *("accepted_tokens", "accepted_nodes", "accepted_lens", "best_path", "commit_lens", "finish"),
    *("tokens", "active", "output_counts", "num_drafts", "draft_live", "draft_lens"),
    *("row_tokens", "row_positions", "row_live", "write_lens", "live_positions"),
)
NOTHING = 1 << 20  # larger than any event
MAX_PATHS = 1 << 10
WORD, HALF = uint64(0xFFFFFFFF), uint64(32)


@dataclass(frozen=True)
class AcceptPlan:
    """The extents and operations that the kernel is specialised by; extents of operations that it lacks are 1.

    accepts, truncates, commits, lays_out  its operations, a run of them: `lays_out` is `draft_rows`
    probability                            of an imposed acceptance; None: acceptance is real
    """

    rows: int
    num_paths: int
    width: int
    stops: int
    context: int
    vocabulary: int
    accepts: bool
    truncates: bool
    commits: bool
    lays_out: bool
    probability: float | None = None
    seed: int = 0


@device_function
def _simulated_count(slot: Any, length: Any, seed: Any, probability: Any, width: Any) -> Any:
    """The rows that a simulated acceptance takes: a coin a draft, keyed by (seed + slot, the draft's position)."""
    key = uint64(int64(seed + slot))
    stream, zero = uint32(SIMULATION_STREAM), uint32(0)
    count, going = int64(1), True
    for place in range(1, width):
        position = uint32(length + place - 1)
        word, _, _, _ = philox(position, zero, stream, zero, uint32(key & WORD), uint32(key >> HALF))
        going = going and uniform(word) < float32(probability)
        if going:
            count += 1
    return count


@device_function
def _walk(path: Any, width: Any, simulated: Any, nodes: Any, targets: Any, drafts: Any) -> Any:
    """How many nodes of a path, root included, are taken; the path's live nodes where acceptance is simulated."""
    if simulated:
        count = int64(0)
        for place in range(width):
            if nodes[path * width + place] >= 0:
                count += 1
        return count
    count, previous, going = int64(1), int64(0), True
    for place in range(1, width):
        node = int64(nodes[path * width + place])
        going = going and node >= 0 and drafts[max(node, int64(0))] == targets[previous]
        if going:
            count += 1
            previous = node
    return count


@device_function
def _event(row: Any, node: Any, token: Any, room: Any, num_stops: Any, finite: Any, stops: Any) -> Any:
    """The reason that ends the run at this row, in the low two bits below the row; NOTHING where it goes on."""
    reason = int64(0)
    if row + 1 >= room:
        reason = int64(FINISH_LENGTH)
    for place in range(num_stops):
        if stops[place] == token and token >= 0:
            reason = int64(FINISH_STOP)
    if finite[node] == 0 or token < 0:
        reason = int64(FINISH_ERROR)
    return int32(row * 4 + reason) if reason != 0 else int32(NOTHING)


@device_function
def _load(thread: Any, threads: Any, count: Any, base: Any, target: Any) -> None:
    """int32 values into shared memory."""
    for turn in range(turns(count, threads)):
        place = thread + turn * threads
        if place < count:
            target[place] = int_at(base, place)


@device_function
def _count_tokens(row: Any, count: Any, token: Any, base: Any, vocabulary: Any, run: Any) -> None:
    """Count a committed token, unless an earlier row of the run has the same and counts for both."""
    first, times = True, int64(0)
    for other in range(count):
        if run[other] == token:
            times += 1
            first = first and other >= row
    if first and token >= 0 and token < vocabulary:
        set_int(base, token, int_at(base, token) + times)


@device_function
def _lay_out_draft_rows(
    index: Any, row: Any, rows: Any, token: Any, count: Any, going: Any, dense: Any, outs: Any
) -> None:
    """The draft model's rows, as `draft_rows` has them."""
    row_tokens, row_positions, row_live, write_lens, live_positions = outs
    live = going and row < count
    set_int(row_tokens, index * rows + row, token if live else int64(-1))
    set_int(row_positions, index * rows + row, dense + row if live else int64(0))
    set_byte(row_live, index * rows + row, 1 if live else 0)
    if row == 0:
        set_int(write_lens, index, dense + 1 if going else int64(0))
        set_int(live_positions, index, dense + count - 1 if going else int64(0))


@device_function
def _load_slot(index: Any, needs: Any, slots: Any, lengths: Any, slot_ints: Any) -> Any:
    """An entry's slot, its committed length, and the tokens that it may still get; zeros for what nothing needs."""
    slotted, measured, limited = needs
    slot, length, room = int64(0), int64(0), int64(0)
    if slotted:
        slot = int_at(slots, index)
    known = max(slot, int64(0))
    if measured:
        length = int_at(lengths, known)
    if limited:
        room = long_at(slot_ints, known * NUM_INTS + MAX_LENGTH) - length
    return slot, length, room


@device_function
def _load_inputs(
    thread: Any, threads: Any, index: Any, slot: Any, sizes: Any, parts: Any, addresses: Any, shared: Any
) -> None:
    """Everything that an entry's acceptance and truncation read, into shared memory."""
    rows, num_paths, width, num_stops = sizes
    accepts, truncates = parts
    target_tokens, draft_tokens, paths, finite, stop_ids = addresses
    targets, drafts, flags, nodes, stops, best = shared
    if thread < rows:
        place, target, draft, flag = index * rows + thread, int64(-1), int64(-1), int64(0)
        if accepts:
            target, draft = int_at(target_tokens, place), int_at(draft_tokens, place)
        if truncates:
            flag = byte_at(finite, place)
        targets[thread] = target
        drafts[thread] = draft
        flags[thread] = flag
    if thread == 0:
        best[0] = 0
        best[1] = NOTHING
    if accepts:
        _load(thread, threads, num_paths * width, paths + index * (num_paths * width * 4), nodes)
    if truncates:
        _load(thread, threads, num_stops, stop_ids + max(slot, int64(0)) * (num_stops * 4), stops)


@device_function
def _walk_all(thread: Any, threads: Any, num_paths: Any, width: Any, simulated: Any, shared: Any) -> None:
    """The longest path, the first of equals: its length above the bits of its number, in best[0]."""
    targets, drafts, _flags, nodes, _stops, best = shared
    for turn in range(turns(num_paths, threads)):
        path = thread + turn * threads
        if path < num_paths:
            count = _walk(path, width, simulated, nodes, targets, drafts)
            cuda.atomic.max(best, 0, int32(count * MAX_PATHS + (MAX_PATHS - 1 - path)))


@device_function
def _take(index: Any, row: Any, slot: Any, sizes: Any, simulated: Any, shared: Any, outs: Any) -> Any:
    """The accepted run: this row's token and node, and the rows that it has."""
    rows, width, limit = sizes
    targets, drafts, _flags, nodes, _stops, best = shared
    accepted_tokens, accepted_nodes, accepted_lens, best_path = outs
    count, number = min(int64(best[0]) >> 10, limit), MAX_PATHS - 1 - (int64(best[0]) & (MAX_PATHS - 1))
    if slot < 0:
        count, number = int64(0), int64(-1)
    token, node = int64(-1), int64(-1)
    if row < count:
        node = int64(nodes[number * width + row]) if row > 0 or simulated else int64(0)
        token = int64(targets[node])
        if simulated and row + 1 < count:
            token = int64(drafts[nodes[number * width + row + 1]])
    if row < rows:
        set_int(accepted_tokens, index * rows + row, token)
        set_int(accepted_nodes, index * rows + row, node)
    if row == 0:
        set_int(accepted_lens, index, count)
        set_int(best_path, index, number)
    return token, node, count


@device_function
def _accept(
    row: Any, threads: Any, index: Any, slot: Any, length: Any, sizes: Any, simulation: Any, shared: Any, outs: Any
) -> Any:
    """Follow all paths, or pretend to, and take the longest run: as `_take` gives it."""
    rows, num_paths, width = sizes
    simulated, seed, probability = simulation
    _walk_all(row, threads, num_paths, width, simulated, shared)
    limit = _simulated_count(slot, length, seed, probability, width) if simulated else int64(rows)
    cuda.syncthreads()
    return _take(index, row, slot, (rows, width, limit), simulated, shared, outs)


@device_function
def _load_run(index: Any, row: Any, rows: Any, slot: Any, truncates: Any, run: Any) -> Any:
    """A run that another launch left: this row's token and node, and the rows that it has, cut already or not."""
    accepted_tokens, accepted_nodes, accepted_lens, commit_lens = run
    place = index * rows + min(row, int64(rows - 1))
    token, node, count = int_at(accepted_tokens, place), int64(-1), int64(0)
    if truncates:
        node = int_at(accepted_nodes, place)
        count = int_at(accepted_lens, index) if slot >= 0 else int64(0)
    else:
        count = int_at(commit_lens, index)
    return token, node, count


@device_function
def _cut(index: Any, row: Any, run: Any, room: Any, num_stops: Any, shared: Any, outs: Any) -> Any:
    """The run cut where it ends: the tokens to commit, and why it ends."""
    token, node, count = run
    _targets, _drafts, flags, _nodes, stops, best = shared
    commit_lens, finish = outs
    if row < count:
        cuda.atomic.min(best, 1, _event(row, node, token, room, num_stops, flags, stops))
    cuda.syncthreads()
    event, committed, reason = int64(best[1]), count, int64(0)
    if event != NOTHING:
        reason = event & 3
        committed = event >> 2 if reason == FINISH_ERROR else (event >> 2) + 1
    if row == 0:
        set_int(commit_lens, index, committed)
        set_int(finish, index, reason)
    return committed, reason


@device_function
def _commit(index: Any, row: Any, slot: Any, length: Any, run: Any, sizes: Any, committed: Any, outs: Any) -> None:
    """Append the run, advance length and counts, end a finished slot, retract its drafts."""
    token, count, reason = run
    context, vocabulary = sizes
    tokens, lengths, active, output_counts, num_drafts, draft_live, draft_lens = outs
    if slot >= 0 and row < count:
        if length + row < context:
            set_int(tokens, slot * context + length + row, token)
        _count_tokens(row, count, token, output_counts + slot * vocabulary * 4, vocabulary, committed)
    if row == 0:
        going = slot >= 0 and reason == 0
        if slot >= 0:
            set_int(lengths, slot, length + count)
            set_int(num_drafts, slot, 0)
            if reason != 0:
                set_int(active, slot, 0)
        set_byte(draft_live, index, 1 if going else 0)
        set_int(draft_lens, index, length + count if going else int64(0))


@cache
def accept_kernel(plan: AcceptPlan) -> Kernel:
    """The kernel for a plan; arguments are addresses, zero for those of operations that it lacks."""
    rows, num_paths, width, num_stops, context, vocabulary = astuple(plan)[:6]
    accepts, truncates, commits, lays_out = plan.accepts, plan.truncates, plan.commits, plan.lays_out
    simulated = plan.probability is not None
    simulation = (simulated, plan.seed, plan.probability or 0.0)
    threads, num_nodes = 32 if rows <= 32 else MAX_ROWS, num_paths * width
    needs = (accepts or truncates or commits, simulated or truncates or commits, truncates)

    def kernel(
        target_tokens: Any,
        draft_tokens: Any,
        paths: Any,
        finite: Any,
        slots: Any,
        lengths: Any,
        slot_ints: Any,
        stop_ids: Any,
        dense_lens: Any,
        accepted_tokens: Any,
        accepted_nodes: Any,
        accepted_lens: Any,
        best_path: Any,
        commit_lens: Any,
        finish: Any,
        tokens: Any,
        active: Any,
        output_counts: Any,
        num_drafts: Any,
        draft_live: Any,
        draft_lens: Any,
        row_tokens: Any,
        row_positions: Any,
        row_live: Any,
        write_lens: Any,
        live_positions: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        targets = cuda.shared.array(shape=rows, dtype=int32)
        drafts = cuda.shared.array(shape=rows, dtype=int32)
        flags = cuda.shared.array(shape=rows, dtype=int32)
        nodes = cuda.shared.array(shape=num_nodes, dtype=int32)
        stops = cuda.shared.array(shape=num_stops, dtype=int32)
        best = cuda.shared.array(shape=2, dtype=int32)
        index, row = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        reason, shared = int64(0), (targets, drafts, flags, nodes, stops, best)
        slot, length, room = _load_slot(index, needs, slots, lengths, slot_ints)
        if accepts or truncates:
            inputs, sizes = (target_tokens, draft_tokens, paths, finite, stop_ids), (rows, num_paths, width, num_stops)
            _load_inputs(row, threads, index, slot, sizes, (accepts, truncates), inputs, shared)
            cuda.syncthreads()
        if accepts:
            extents, outs = (rows, num_paths, width), (accepted_tokens, accepted_nodes, accepted_lens, best_path)
            token, node, count = _accept(row, threads, index, slot, length, extents, simulation, shared, outs)
        else:
            run = (accepted_tokens, accepted_nodes, accepted_lens, commit_lens)
            token, node, count = _load_run(index, row, rows, slot, truncates, run)
        if truncates:
            count, reason = _cut(index, row, (token, node, count), room, num_stops, shared, (commit_lens, finish))
        elif commits:
            reason = int_at(finish, index)
        if commits:
            if row < rows:
                targets[row] = token
            cuda.syncthreads()
            state = (tokens, lengths, active, output_counts, num_drafts, draft_live, draft_lens)
            _commit(index, row, slot, length, (token, count, reason), (context, vocabulary), targets, state)
        if lays_out and row < rows:
            draft_outs = (row_tokens, row_positions, row_live, write_lens, live_positions)
            going = slot >= 0 and reason == 0
            if not commits:
                going = byte_at(draft_live, index) != 0
            _lay_out_draft_rows(index, row, rows, token, count, going, int_at(dense_lens, index), draft_outs)

    name = "accept_" + "_".join(str(part) for part in astuple(plan))
    return Kernel(name, kernel, (types.int64,) * len(ARGUMENTS), threads)
