"""How drafts of each kind of confidence fared, counted: `learn_confidence` of the reference, and `join_confidence`, the
beginning of a slot's odds.

One block: all odds lie in shared memory. A thread counts one position of a slot's record, or of that over all requests,
through all that was drafted, in order; so no two write the same number. It knows no request and no model.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, divide, int_at, set_int, turns
from lowlat.kernels.reference.sampling.draft_confidence import NUM_KINDS
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.depths import NUM_PLACES, SURE_PRIOR, check_sure
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.kernels.reference.step.width_odds import AGE, ALL_DECAY, DECAY, MAX_WIDTH
from lowlat.kernels.step.width_odds import count_position, reckon, run_kind
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = ["examples", "join_confidence", "learn_confidence"]

THREADS = 512
MAX_SLOTS = 8
LANES = MAX_WIDTH + 1  # threads of a record: a power of two
JOIN_THREADS = 160  # one for each pair of odds of a record
KNOWN, TRIED, RIGHT, RUN, NEXT_RUN, FATES = 0, 1, 2, 3, 4, 5  # columns of what became of an entry's drafts
PRIORS = tuple(number for rates in SURE_PRIOR for entry in rates for number in entry)
PRIOR_ROW = len(PRIORS) // NUM_KINDS


@dataclass(frozen=True)
class _Plan:
    """The extents that counting is specialised by; `ends` are the columns of kinds."""

    batch: int
    max_batch: int
    most: int
    ends: int

    @property
    def num_odds(self) -> int:
        """Numbers in all records."""
        return (self.max_batch + 1) * NUM_PLACES * self.most * 2


def learn_confidence(
    slots: torch.Tensor,
    accepted_lens: torch.Tensor,
    num_verified: torch.Tensor,
    verified_source: torch.Tensor,
    draft_kinds: torch.Tensor,
    draft_ends: torch.Tensor,
    draft_runs: torch.Tensor,
    width_runs: torch.Tensor,
    *,
    sure_odds: torch.Tensor,
    sure_expected: torch.Tensor,
) -> list[KernelCall]:
    """Count and reckon, as the reference's `learn_confidence`, whose arguments these are.

    Time: two trips to memory, a count for each end of each entry, and some 30 short divisions in a row. Raises
    ShapeError.
    """
    check_sure(sure_odds, sure_expected)
    (batch, ends), max_batch = draft_kinds.shape, sure_expected.shape[0]
    by_entry = {"slots": slots, "accepted_lens": accepted_lens, "num_verified": num_verified}
    for name, tensor in (*by_entry.items(), ("verified_source", verified_source)):
        check_shape(name, tensor, batch)
    check_shape("draft_ends", draft_ends, ends)
    for name, tensor in (("draft_runs", draft_runs), ("width_runs", width_runs)):
        check_shape(name, tensor, max_batch)
    if max(batch, max_batch) > MAX_SLOTS or ends > MAX_WIDTH:
        raise ShapeError(
            f"odds are kept of at most {MAX_SLOTS} slots and {MAX_WIDTH} ends, got {batch} of {max_batch}, and {ends}"
        )
    kernel = _make(_Plan(batch, max_batch, sure_odds.shape[2], ends))
    reads = (slots, accepted_lens, num_verified, verified_source, draft_kinds, draft_ends, draft_runs, width_runs)
    return [KernelCall(kernel, (1, 1, 1), (*reads, sure_odds, sure_expected))]


@device_function
def _place_of(slot: Any, run: Any, kind: Any, most: Any) -> Any:
    """The place of a slot's odds behind runs of a kind, from a draft of a kind on."""
    return ((slot * NUM_PLACES) + run * NUM_KINDS + kind) * (most * 2)


@device_function
def _load_fate(index: Any, addresses: Any, fates: Any) -> None:
    """Load what became of an entry's drafts."""
    slots, accepted_lens, num_verified, verified_source, draft_runs, width_runs = addresses
    slot, accepted = int_at(slots, index), int_at(accepted_lens, index)
    tried, source = int_at(num_verified, index), int_at(verified_source, index)
    held = max(slot, int64(0))
    run, following = int_at(draft_runs, held), int_at(width_runs, held)
    if source == FORCED_DRAFTS:
        tried = int64(0)
    fates[index * FATES + KNOWN] = int32(slot) if slot >= 0 and accepted > 0 else int32(-1)
    fates[index * FATES + TRIED] = int32(tried)
    fates[index * FATES + RIGHT] = int32(accepted - 1)
    fates[index * FATES + RUN] = int32(run)
    fates[index * FATES + NEXT_RUN] = int32(run_kind(following))


@device_function
def _count_entry(index: Any, slot: Any, position: Any, aging: Any, plan: Any, shared: Any) -> None:
    """Count one position of what an entry drafted, at each end behind right drafts alone, in a slot's record.

    aging  powers of two by which what was seen and what was not forgets, and the first position that forgets so
    """
    most, ends = plan[2], plan[3]
    odds, fates, kinds, places = shared
    decay, age, begun = aging
    tried, right = int64(fates[index * FATES + TRIED]), int64(fates[index * FATES + RIGHT])
    run = int64(fates[index * FATES + RUN])
    for column in range(ends):
        end = int64(places[column])
        if end <= min(tried, right + 1):
            at = _place_of(slot, run, int64(kinds[index * ends + column]), most) + position * 2
            count_position(at, position, tried - end + 1, right - end + 1, odds, decay, age, begun)


@device_function
def _count(thread: Any, plan: Any, shared: Any) -> None:
    """A thread for each position of an entry's record, and those behind them for the record over all requests."""
    batch, max_batch, most = plan[:3]
    fates = shared[1]
    entry, position = thread // LANES, thread % LANES
    if entry < batch and position < most:
        slot = int64(fates[entry * FATES + KNOWN])
        if slot >= 0:
            _count_entry(entry, slot, position, (int64(DECAY), int64(AGE), int64(0)), plan, shared)
    elif entry == batch and position < most:
        for index in range(batch):
            if fates[index * FATES + KNOWN] >= 0:
                aging = (int64(ALL_DECAY), int64(ALL_DECAY), int64(1))
                _count_entry(index, int64(max_batch), position, aging, plan, shared)


@cache
def _make(plan: _Plan) -> Kernel:
    num_odds, num_fates, num_kinds = plan.num_odds, plan.batch * FATES, plan.batch * plan.ends
    sizes, threads, ends, num_reckoned = astuple(plan), THREADS, plan.ends, plan.batch * NUM_KINDS
    max_batch, batch, most = plan.max_batch, plan.batch, plan.most

    def kernel(
        slots: Any, accepted_lens: Any, num_verified: Any, verified_source: Any, draft_kinds: Any, draft_ends: Any,
        draft_runs: Any, width_runs: Any, sure_odds: Any, sure_expected: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        odds = cuda.shared.array(shape=num_odds, dtype=int32)
        fates = cuda.shared.array(shape=num_fates, dtype=int32)
        kinds = cuda.shared.array(shape=num_kinds, dtype=int32)
        places = cuda.shared.array(shape=ends, dtype=int32)
        thread = int64(cuda.threadIdx.x)
        if thread < batch:
            addresses = (slots, accepted_lens, num_verified, verified_source, draft_runs, width_runs)
            _load_fate(thread, addresses, fates)
        elif 32 <= thread < 32 + ends:
            places[thread - 32] = int32(int_at(draft_ends, thread - 32))
        elif 64 <= thread < 64 + num_kinds:
            kinds[thread - 64] = int32(int_at(draft_kinds, thread - 64))
        for turn in range(turns(num_odds, threads)):
            place = thread + turn * threads
            if place < num_odds:
                odds[place] = int32(int_at(sure_odds, place))
        cuda.syncthreads()
        _count(thread, sizes, (odds, fates, kinds, places))
        cuda.syncthreads()
        if thread < num_reckoned:
            entry, kind = divide(thread, NUM_KINDS)
            slot, run = int64(fates[entry * FATES + KNOWN]), int64(fates[entry * FATES + NEXT_RUN])
            if slot >= 0:
                own, every = _place_of(slot, run, kind, most), _place_of(int64(max_batch), run, kind, most)
                reckon(own, every, odds, (slot * NUM_KINDS + kind) * (most + 1), sure_expected, most)
        for turn in range(turns(num_odds, threads)):
            place = thread + turn * threads
            if place < num_odds:
                set_int(sure_odds, place, int64(odds[place]))

    return Kernel("learn_confidence_" + "_".join(map(str, astuple(plan))), kernel, (types.int64,) * 10, threads)


def join_confidence(
    slots: torch.Tensor, draft_live: torch.Tensor, *, sure_odds: torch.Tensor, sure_expected: torch.Tensor
) -> list[KernelCall]:
    """Begin a slot's odds, as the reference's `join_confidence`, whose arguments these are. Raises ShapeError."""
    check_sure(sure_odds, sure_expected)
    check_shape("slots", slots, 1)
    check_shape("draft_live", draft_live, 1)
    kernel = _make_join(sure_expected.shape[0], sure_odds.shape[2])
    return [KernelCall(kernel, (1, 1, 1), (slots, draft_live, sure_odds, sure_expected))]


@cache
def _make_join(max_batch: int, most: int) -> Kernel:
    num_pairs, num_first = NUM_PLACES * most, NUM_KINDS * most  # of a record, and of it those that are reckoned
    num_odds = 2 * most + 2 * num_first  # a slot's own odds, which are none, then those over all requests

    def kernel(slots: Any, draft_live: Any, sure_odds: Any, sure_expected: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        odds = cuda.shared.array(shape=num_odds, dtype=int32)
        pair, slot = int64(cuda.threadIdx.x), int_at(slots, 0)
        if slot < 0 or byte_at(draft_live, 0) == 0:
            return
        every = _place_of(int64(max_batch), int64(0), int64(0), most)
        is_new = int_at(sure_odds, every + 1) == 0
        cuda.syncthreads()
        if pair < most:
            odds[pair * 2], odds[pair * 2 + 1] = int32(0), int32(0)
        if pair < num_pairs:
            right, tried = int_at(sure_odds, every + pair * 2), int_at(sure_odds, every + pair * 2 + 1)
            if is_new:
                place, position = divide(pair, most)
                _, kind = divide(place, NUM_KINDS)
                prior = kind * PRIOR_ROW + position * 2
                right, tried = int64(PRIORS[prior]), int64(PRIORS[prior + 1])
                set_int(sure_odds, every + pair * 2, right)
                set_int(sure_odds, every + pair * 2 + 1, tried)
            own = _place_of(slot, int64(0), int64(0), most) + pair * 2
            set_int(sure_odds, own, int64(0))
            set_int(sure_odds, own + 1, int64(0))
            if pair < num_first:
                odds[(most + pair) * 2], odds[(most + pair) * 2 + 1] = int32(right), int32(tried)
        cuda.syncthreads()
        if pair < NUM_KINDS:
            first = (slot * NUM_KINDS + pair) * (most + 1)
            reckon(int64(0), (most + pair * most) * 2, odds, first, sure_expected, most)

    return Kernel(f"join_confidence_{max_batch}_{most}", kernel, (types.int64,) * 4, JOIN_THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make(_Plan(4, 8, 7, 3)), _make(_Plan(1, 1, 5, 2)), _make_join(8, 7)]
