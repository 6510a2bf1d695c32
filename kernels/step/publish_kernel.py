"""This module has the kernel of a step's end: one block stores the drafts for the next step and an entry of the ring.

If each step chooses its draft length, other blocks store the features of committed positions, and one counts the
accepted drafts, while the first block waits for the host's memory. The ring is in pinned host memory. Only the flag
that stops a device loop is read from there. One thread releases the ring's head after all others have written. The
kernel is specialised by a `PublishPlan`.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.memory import divide, int_at, long_at, set_int, set_long, turns
from lowlat.kernels.reference.step.publish import (
    ACCEPTED,
    COMMITTED,
    FINISH,
    LENGTH_AFTER,
    RECORD_WIDTH,
    SLOT,
    VERIFIED,
    VERIFIED_DEPTH,
    VERIFIED_SOURCE,
)
from lowlat.kernels.speculation.length_probabilities import FATES, LearningPlan, learn
from lowlat.kernels.speculation.limits import MAX_SOURCES
from lowlat.kernels.speculation.waiting import KeepingPlan, keep_row
from lowlat.kernels.step.next_drafts import load_drafts, load_going, write_drafts, write_paths
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, plan_name
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint32

__all__ = ["ARGUMENTS", "NOTHING_KEPT", "NOTHING_LEARNT", "PublishPlan", "publish_kernel"]

ARGUMENTS = (
    *("slots", "commit_lens", "accepted_lens", "accepted_tokens", "accepted_nodes", "finish", "num_verified"),
    *("verified_depth", "verified_source", "lengths", "logprob_values", "logprob_ids", "ring_count", "ring_records"),
    *(
        "ring_tokens",
        "ring_logprob_values",
        "ring_logprob_ids",
        "ring_head",
        "draft_nodes",
        "draft_live",
        "topology_masks",
    ),
    *("topology_paths", "drafts", "num_drafts", "tree_masks", "tree_paths"),
    *("dense_lens", *(f"source{number}" for number in range(MAX_SOURCES)), "waiting_features"),
    *("extended", "length_probabilities", "length_runs", "length_expected"),
    *("active", "loop_budget", "stop_flag", "condition"),
)

NOTHING_KEPT, NOTHING_LEARNT = KeepingPlan(), LearningPlan()


@dataclass(frozen=True)
class PublishPlan:
    """The extents that the kernel is specialised by; extents of an operation that it lacks are 0.

    ring, columns            of the ring; 0: nothing is published
    max_batch, max_rows      of the ring, and of the drafts' state
    paths, width             of the state's tree paths
    known_paths, known_length  of the topology's; 0: nothing is drafted
    nodes                    of a slot in `draft_nodes`, of which the topology has the first
    looping                  it decides whether the step is repeated
    keeping, learning        what other blocks do of `keep_features` and `learn_draft_lengths`; without extents, nothing
    """

    batch: int
    rows: int
    ring: int
    max_batch: int
    max_rows: int
    columns: int
    paths: int = 0
    width: int = 0
    known_paths: int = 0
    known_length: int = 0
    looping: bool = False
    threads: int = 512
    keeping: KeepingPlan = NOTHING_KEPT
    learning: LearningPlan = NOTHING_LEARNT
    nodes: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the launch."""
        return 1 + self.keeping.num_blocks + (1 if self.learning.most else 0)


@device_function
def _load_record(index: Any, addresses: Any, record: Any) -> None:
    """An entry's record into shared memory: all loads that do not depend on the slot first."""
    slots, commit_lens, accepted_lens, finish, num_verified, verified_depth, verified_source, lengths = addresses
    slot, committed, accepted = int_at(slots, index), int_at(commit_lens, index), int_at(accepted_lens, index)
    reason, verified, depth = int_at(finish, index), int_at(num_verified, index), int_at(verified_depth, index)
    source, length = int_at(verified_source, index), int_at(lengths, max(slot, int64(0)))
    first = index * RECORD_WIDTH
    record[first + SLOT] = slot
    record[first + COMMITTED] = committed if slot >= 0 else int64(0)
    record[first + FINISH] = reason
    record[first + VERIFIED] = verified
    record[first + ACCEPTED] = min(accepted - 1, committed)
    record[first + LENGTH_AFTER] = length
    record[first + VERIFIED_DEPTH] = depth
    record[first + VERIFIED_SOURCE] = source


@device_function
def _load_rows(thread: Any, threads: Any, count: Any, sources: Any, targets: Any) -> None:
    """Tokens and nodes of the accepted rows."""
    for turn in range(turns(count, threads)):
        place = thread + turn * threads
        if place < count:
            token, node = int_at(sources[0], place), int_at(sources[1], place)
            targets[0][place] = token
            targets[1][place] = node


@device_function
def _write_records(thread: Any, threads: Any, batch: Any, max_batch: Any, record: Any, target: Any) -> None:
    """The entry's records; of a pad the slot alone."""
    for turn in range(turns(max_batch * RECORD_WIDTH, threads)):
        place = thread + turn * threads
        if place < max_batch * RECORD_WIDTH:
            index, column = divide(place, RECORD_WIDTH)
            slot = int64(-1)
            if index < batch:
                slot = int64(record[index * RECORD_WIDTH + SLOT])
            if column == SLOT:
                set_int(target, place, slot)
            elif slot >= 0:
                set_int(target, place, int64(record[place]))


@device_function
def _write_tokens(thread: Any, threads: Any, sizes: Any, record: Any, tokens: Any, target: Any) -> None:
    """The committed tokens, -1 after them."""
    batch, rows, max_batch, max_rows, _columns = sizes
    for turn in range(turns(max_batch * max_rows, threads)):
        place = thread + turn * threads
        if place < max_batch * max_rows:
            index, row = divide(place, max_rows)
            token = int64(-1)
            if index < batch and row < rows and row < record[index * RECORD_WIDTH + COMMITTED]:
                token = int64(tokens[index * rows + row])
            set_int(target, place, token)


@device_function
def _write_logprobs(
    thread: Any, threads: Any, sizes: Any, record: Any, nodes: Any, sources: Any, values: Any, ids: Any
) -> None:
    """The committed tokens' logprobs; ids of -1 after them, where the values stay as they are."""
    batch, rows, max_batch, max_rows, columns = sizes
    for turn in range(turns(max_batch * max_rows * columns, threads)):
        place = thread + turn * threads
        if place < max_batch * max_rows * columns:
            flat, column = divide(place, columns)
            index, row = divide(flat, max_rows)
            known = int64(-1)
            if index < batch and row < rows and row < record[index * RECORD_WIDTH + COMMITTED]:
                source = (index * rows + nodes[index * rows + row]) * columns + column
                value, known = int_at(sources[0], source), int_at(sources[1], source)  # the value's bits
                set_int(values, place, value)
            set_int(ids, place, known)


@device_function
def _load_entry(thread: Any, threads: Any, batch: Any, rows: Any, addresses: Any, run: Any, shared: Any) -> None:
    """The fields of an entry of the ring."""
    record, tokens, nodes = shared
    if thread < batch:
        _load_record(thread, addresses, record)
    _load_rows(thread, threads, batch * rows, run, (tokens, nodes))


@device_function
def _write_entry(thread: Any, threads: Any, sizes: Any, entry: Any, shared: Any, sources: Any, rings: Any) -> None:
    """An entry of the ring, in coalesced stores."""
    batch, _rows, max_batch, max_rows, columns = sizes
    record, tokens, nodes = shared
    records, ring_tokens, values, ids = rings
    cells = entry * (max_batch * max_rows * 4)
    _write_records(thread, threads, batch, max_batch, record, records + entry * (max_batch * RECORD_WIDTH * 4))
    _write_tokens(thread, threads, sizes, record, tokens, ring_tokens + cells)
    _write_logprobs(thread, threads, sizes, record, nodes, sources, values + cells * columns, ids + cells * columns)


@device_function
def _loop_state(max_batch: Any, active: Any, loop_budget: Any, stop_flag: Any) -> Any:
    """The conditions by which the step is repeated: a stop, the budget, the number of active slots."""
    stop, budget = ptx.load_volatile_i64(stop_flag), long_at(loop_budget, 0)
    num_active = int64(0)
    for slot in range(max_batch):
        num_active += int64(1) if int_at(active, slot) != 0 else int64(0)
    return stop, budget, num_active


@device_function
def _repeat(condition: Any, loop_budget: Any, state: Any) -> None:
    """Decide whether the WHILE node runs its body again."""
    stop, budget, num_active = state
    set_long(loop_budget, 0, budget - 1)
    again = num_active > 0 and budget > 1 and stop == 0
    ptx.set_graph_condition(condition, uint32(1) if again else uint32(0))


@cache
def publish_kernel(plan: PublishPlan) -> Kernel:
    """The kernel for a plan; arguments are addresses, zero for those of parts that it does not do."""
    batch, rows, ring, max_batch, max_rows, columns = astuple(plan)[:6]
    publishing, drafting, looping, threads = ring > 0, plan.known_paths > 0, plan.looping, plan.threads
    num_rows, num_words, path_sizes = batch * rows, batch * RECORD_WIDTH, astuple(plan)[6:10]
    num_kept, keep_sizes, learning = plan.keeping.num_blocks, astuple(plan.keeping)[1:], plan.learning.most > 0
    learn_sizes, extends = astuple(plan.learning)[:3], plan.learning.extends
    num_probabilities, num_fates, num_drafted = (
        max(plan.learning.num_probabilities, 1),
        max(plan.learning.batch * FATES, 1),
        plan.nodes,
    )

    def kernel(
        slots: Any, commit_lens: Any, accepted_lens: Any, accepted_tokens: Any, accepted_nodes: Any, finish: Any,
        num_verified: Any, verified_depth: Any, verified_source: Any, lengths: Any, logprob_values: Any,
        logprob_ids: Any, ring_count: Any, ring_records: Any, ring_tokens: Any, ring_logprob_values: Any,
        ring_logprob_ids: Any, ring_head: Any, draft_nodes: Any, draft_live: Any, topology_masks: Any,
        topology_paths: Any, drafts: Any, num_drafts: Any, tree_masks: Any, tree_paths: Any, dense_lens: Any,
        source0: Any, source1: Any, source2: Any, source3: Any, source4: Any, waiting_features: Any, extended: Any,
        length_probabilities: Any, length_runs: Any, length_expected: Any, active: Any, loop_budget: Any, stop_flag:
        Any, condition: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        thread, block = int64(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        if num_kept > 0 and block > 0 and block <= num_kept:
            heads, five = (
                (accepted_nodes, commit_lens, dense_lens, slots),
                (source0, source1, source2, source3, source4),
            )
            keep_row(block - 1, thread, threads, keep_sizes, heads, five, waiting_features)
            return
        if learning and block > num_kept:
            probabilities = cuda.shared.array(shape=num_probabilities, dtype=int32)
            fates = cuda.shared.array(shape=num_fates, dtype=int32)
            told, records = (
                (slots, accepted_lens, num_verified, verified_source, dense_lens),
                (extended, length_probabilities),
            )
            learn(
                thread,
                threads,
                learn_sizes,
                extends,
                told,
                (*records, length_runs, length_expected),
                probabilities,
                fates,
            )
            return
        record = cuda.shared.array(shape=num_words, dtype=int32)
        tokens = cuda.shared.array(shape=num_rows, dtype=int32)
        nodes = cuda.shared.array(shape=num_rows, dtype=int32)
        drafted = cuda.shared.array(shape=num_rows, dtype=int32)
        going = cuda.shared.array(shape=batch, dtype=int32)
        ends = cuda.shared.array(shape=batch, dtype=int32)
        count, shared = int64(0), (record, tokens, nodes)
        sizes = (batch, rows, max_batch, max_rows, columns)
        if publishing:
            count = long_at(ring_count, 0)
        if looping and thread == 0:
            state = _loop_state(max_batch, active, loop_budget, stop_flag)
        if publishing:
            verified = (num_verified, verified_depth, verified_source)
            columns_of = (slots, commit_lens, accepted_lens, finish, *verified, lengths)
            _load_entry(thread, threads, batch, rows, columns_of, (accepted_tokens, accepted_nodes), shared)
        if drafting:
            load_going(thread, batch, slots, draft_live, going)
            load_drafts(thread, threads, (batch, rows, num_drafted), draft_nodes, drafted, ends)
        cuda.syncthreads()
        if publishing:
            rings = (ring_records, ring_tokens, ring_logprob_values, ring_logprob_ids)
            sources = (logprob_values, logprob_ids)
            _write_entry(thread, threads, sizes, count % ring, shared, sources, rings)
        if drafting:
            drafts_sizes = (batch, rows, max_rows)
            write_drafts(thread, threads, drafts_sizes, going, drafted, ends, (topology_masks, drafts, tree_masks))
            write_paths(thread, threads, batch, path_sizes, going, topology_paths, tree_paths)
        cuda.syncthreads()
        if drafting and thread < batch and going[thread] >= 0:
            set_int(num_drafts, int64(going[thread]), int64(ends[thread]) - 1)
        if publishing and thread == 0:
            set_long(ring_count, 0, count + 1)
            ptx.store_release_system(ring_head, count + 1)
            if looping:
                _repeat(condition, loop_budget, state)

    name = plan_name("publish", plan)
    signature = (*[types.int64] * (len(ARGUMENTS) - 1), types.uint64)
    return Kernel(name, kernel, signature, threads, linked=not looping)
