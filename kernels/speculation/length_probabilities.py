"""This module has `learn_draft_lengths` of the reference, alone or in the kernel of a step's end, and `join_lengths`.

It is one block, with all acceptance probabilities in shared memory. One thread counts a slot, and another counts all
slots in turn.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, divide, int_at, set_int, turns
from lowlat.kernels.reference.speculation import length_probabilities as reference
from lowlat.kernels.reference.speculation.length_probabilities import (
    AGE,
    ALL_DECAY,
    DECAY,
    MAX_WAITED,
    NUM_RUNS,
    ONE,
    PRIOR,
    RUNS,
    WEIGHT,
    check_most,
)
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = ["FATES", "LearningPlan", "examples", "join_lengths", "learn", "learn_draft_lengths", "learning_plan"]

THREADS = 512
MAX_SLOTS = 32  # each has a thread of the first warp
KNOWN, TRIED, RIGHT, RUN, NEXT_RUN, FATES = 0, 1, 2, 3, 4, 5  # columns of what became of an entry's drafts
PRIORS = tuple(number for rates in PRIOR for entry in rates for number in entry)
PRIOR_ROW = len(PRIORS) // NUM_RUNS


@dataclass(frozen=True)
class LearningPlan:
    """The extents that counting is specialised by; a greatest draft length of 0: nothing is counted."""

    batch: int = 0
    max_batch: int = 0
    most: int = 0
    extends: bool = False

    @property
    def num_probabilities(self) -> int:
        """Numbers in all records."""
        return (self.max_batch + 1) * NUM_RUNS * self.most * 2


def learning_plan(given: Given) -> LearningPlan:
    """The plan for these arguments of `learn_draft_lengths`. Raises ShapeError for too many slots or drafts."""
    batch, max_batch, most = given.sizes("B", "max_B", "K")
    check_most(most)
    if max_batch > MAX_SLOTS:
        raise ShapeError(f"acceptance probabilities are kept of at most {MAX_SLOTS} slots, got {max_batch}")
    return LearningPlan(batch, max_batch, most, given.params["extends"])


@launches(reference.learn_draft_lengths)
def learn_draft_lengths(given: Given) -> list[KernelCall]:
    """Count and reckon, as the reference's `learn_draft_lengths`.

    Time: two trips to memory, and some 40 short divisions in a row. Raises ShapeError as `learning_plan` does.
    """
    return [KernelCall(_make(learning_plan(given)), (1, 1, 1), given.tensors)]


@device_function
def _run_index(run: Any) -> Any:
    """The kind of a run of right drafts."""
    found = int64(0)
    for least in RUNS:
        found += int64(1) if run >= least else int64(0)
    return found


@device_function
def _record_of(slot: Any, kind: Any, most: Any) -> Any:
    """The place of a slot's acceptance probabilities after runs of a kind."""
    return (slot * NUM_RUNS + kind) * (most * 2)


@device_function
def _count(first: Any, tried: Any, right: Any, probabilities: Any, decay: Any, age: Any, begun: Any, most: Any) -> None:
    """Count a step's drafts in a record; positions from `begun` on that it did not see age."""
    for position in range(most):
        at = first + position * 2
        hits, tries = int64(probabilities[at]), int64(probabilities[at + 1])
        if position < tried and position <= right:
            hits += (int64(ONE) if position < right else int64(0)) - (hits >> decay)
            tries += int64(ONE) - (tries >> decay)
        elif position >= begun:
            hits -= hits >> age
            tries -= tries >> age
        probabilities[at] = int32(hits)
        probabilities[at + 1] = int32(tries)


@device_function
def _reckon(own: Any, every: Any, probabilities: Any, slot: Any, expected: Any, most: Any) -> None:
    """Tokens of a slot's step by its length, in 1024ths, by the acceptance probabilities that begin at two places."""
    total, product, before, before_all = int64(ONE), int64(ONE), int64(ONE), int64(ONE)
    set_int(expected, slot * (most + 1), total)
    for position in range(most):
        weight = int64(WEIGHT) if position > 0 else int64(0)
        right_all, tried_all = (
            int64(probabilities[every + position * 2]),
            int64(probabilities[every + position * 2 + 1]),
        )
        rate_all, _ = divide((right_all + weight * before_all) * ONE, max(tried_all + weight * ONE, int64(1)))
        usual, _ = divide(rate_all * before, max(before_all, int64(1)))
        usual = min(usual, int64(ONE))
        right, tried = int64(probabilities[own + position * 2]), int64(probabilities[own + position * 2 + 1])
        rate, _ = divide((right + WEIGHT * usual) * ONE, tried + WEIGHT * ONE)
        rate = min(rate, int64(ONE))
        product, _ = divide(product * rate, int64(ONE))
        total += product
        set_int(expected, slot * (most + 1) + position + 1, total)
        before, before_all = rate, rate_all


@device_function
def _load_fate(index: Any, addresses: Any, runs: Any, fates: Any) -> Any:
    """Load the fate of an entry's drafts; returns its slot, -1 where there is none."""
    slots, accepted_lens, num_verified, verified_source = addresses
    slot, accepted = int_at(slots, index), int_at(accepted_lens, index)
    tried, source = int_at(num_verified, index), int_at(verified_source, index)
    run = int_at(runs, max(slot, int64(0)))
    if source == FORCED_DRAFTS:
        tried = int64(0)
    right, known = accepted - 1, slot >= 0 and accepted > 0
    fates[index * FATES + KNOWN] = int32(slot) if known else int32(-1)
    fates[index * FATES + TRIED] = int32(tried)
    fates[index * FATES + RIGHT] = int32(right)
    fates[index * FATES + RUN] = int32(_run_index(run))
    following = right if tried > 0 else run
    fates[index * FATES + NEXT_RUN] = int32(_run_index(following))
    if known:
        set_int(runs, slot, following)
    return slot if known else int64(-1)


@device_function
def _count_all(sizes: Any, fates: Any, probabilities: Any) -> None:
    """Count all entries' drafts, one after the other, in the record over all requests."""
    batch, max_batch, most = sizes
    for index in range(batch):
        if fates[index * FATES + KNOWN] >= 0:
            first = _record_of(int64(max_batch), int64(fates[index * FATES + RUN]), most)
            tried, right = int64(fates[index * FATES + TRIED]), int64(fates[index * FATES + RIGHT])
            _count(first, tried, right, probabilities, int64(ALL_DECAY), int64(ALL_DECAY), int64(1), most)


@device_function
def learn(
    thread: Any, threads: Any, sizes: Any, extends: Any, addresses: Any, records: Any, probabilities: Any, fates: Any
) -> None:
    """All of `learn_draft_lengths` by one block of at least 64 threads.

    sizes    of the plan: batch, max_batch, most
    records  addresses of what is updated
    """
    batch, max_batch, most = sizes
    extended, all_probabilities, runs, expected = records
    num_probabilities = (max_batch + 1) * (NUM_RUNS * 2) * most
    for turn in range(turns(num_probabilities, threads)):
        place = thread + turn * threads
        if place < num_probabilities:
            probabilities[place] = int32(int_at(all_probabilities, place))
    slot = int64(-1)
    if thread < batch:
        slot = _load_fate(thread, addresses[:4], runs, fates)
        if extends and slot >= 0:
            set_int(extended, slot, int_at(addresses[4], thread))
    cuda.syncthreads()
    if thread < batch and slot >= 0:
        first = _record_of(slot, int64(fates[thread * FATES + RUN]), most)
        tried, right = int64(fates[thread * FATES + TRIED]), int64(fates[thread * FATES + RIGHT])
        _count(first, tried, right, probabilities, int64(DECAY), int64(AGE), int64(0), most)
    elif thread == 32:
        _count_all(sizes, fates, probabilities)
    cuda.syncthreads()
    if thread < batch and slot >= 0:
        kind = int64(fates[thread * FATES + NEXT_RUN])
        every = _record_of(int64(max_batch), kind, most)
        _reckon(_record_of(slot, kind, most), every, probabilities, slot, expected, most)
    for turn in range(turns(num_probabilities, threads)):
        place = thread + turn * threads
        if place < num_probabilities:
            set_int(all_probabilities, place, int64(probabilities[place]))


@cache
def _make(plan: LearningPlan) -> Kernel:
    num_probabilities, num_fates, sizes = plan.num_probabilities, plan.batch * FATES, astuple(plan)[:3]
    extends, threads = plan.extends, THREADS

    def kernel(
        slots: Any,
        accepted_lens: Any,
        num_verified: Any,
        verified_source: Any,
        dense_lens: Any,
        extended: Any,
        length_probabilities: Any,
        length_runs: Any,
        length_expected: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        probabilities = cuda.shared.array(shape=num_probabilities, dtype=int32)
        fates = cuda.shared.array(shape=num_fates, dtype=int32)
        addresses = (slots, accepted_lens, num_verified, verified_source, dense_lens)
        records = (extended, length_probabilities, length_runs, length_expected)
        learn(int64(cuda.threadIdx.x), threads, sizes, extends, addresses, records, probabilities, fates)

    return Kernel("learn_draft_lengths_" + "_".join(map(str, astuple(plan))), kernel, (types.int64,) * 9, threads)


@launches(reference.join_lengths)
def join_lengths(given: Given) -> list[KernelCall]:
    """Begin a slot's record, as the reference's `join_lengths`. Raises ShapeError for too many drafts."""
    max_batch, most = given.sizes("max_B", "K")
    check_most(most)
    return [KernelCall(_make_join(max_batch, most), (1, 1, 1), given.tensors)]


@cache
def _make_join(max_batch: int, most: int) -> Kernel:
    num_pairs, num_probabilities = NUM_RUNS * most, 4 * NUM_RUNS * most

    def kernel(
        slots: Any,
        lengths: Any,
        draft_live: Any,
        extended: Any,
        length_probabilities: Any,
        length_runs: Any,
        length_expected: Any,
        length_waited: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        probabilities = cuda.shared.array(shape=num_probabilities, dtype=int32)
        pair, slot = int64(cuda.threadIdx.x), int_at(slots, 0)
        if slot < 0 or byte_at(draft_live, 0) == 0:
            return
        length, every = int_at(lengths, slot), _record_of(int64(max_batch), int64(0), most)
        is_new = int_at(length_probabilities, every + 1) == 0
        cuda.syncthreads()
        if pair < num_pairs:
            kind, position = divide(pair, most)
            right, tried = (
                int_at(length_probabilities, every + pair * 2),
                int_at(length_probabilities, every + pair * 2 + 1),
            )
            if is_new:
                prior = kind * PRIOR_ROW + position * 2
                right, tried = int64(PRIORS[prior]), int64(PRIORS[prior + 1])
                set_int(length_probabilities, every + pair * 2, right)
                set_int(length_probabilities, every + pair * 2 + 1, tried)
            own = _record_of(slot, int64(0), most) + pair * 2
            set_int(length_probabilities, own, int64(0))
            set_int(length_probabilities, own + 1, int64(0))
            probabilities[pair * 2], probabilities[pair * 2 + 1] = int32(0), int32(0)
            probabilities[(num_pairs + pair) * 2], probabilities[(num_pairs + pair) * 2 + 1] = (
                int32(right),
                int32(tried),
            )
        cuda.syncthreads()
        if pair == 0:
            _reckon(int64(0), int64(num_pairs * 2), probabilities, slot, length_expected, most)
            set_int(extended, slot, length - 2)
            set_int(length_runs, slot, int64(0))
            set_int(length_waited, 0, int64(MAX_WAITED))

    return Kernel(f"join_lengths_{max_batch}_{most}", kernel, (types.int64,) * 8, 32)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make(LearningPlan(4, 8, 7, True)), _make(LearningPlan(1, 1, 5)), _make_join(8, 7)]
