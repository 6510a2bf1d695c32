"""This module has `choose_drafts` of the reference as a kernel, which chooses a model's drafts or those from text.

A block has a slot. Its threads load everything into shared memory at once, and one of them learns and chooses.
"""

from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, divide, int_at, set_int
from lowlat.kernels.reference.speculation import choose_drafts as reference
from lowlat.kernels.reference.speculation.choose_drafts import (
    CHOSEN,
    DECAY,
    FIRST,
    MADE_AT,
    MATCH,
    MAX_DRAFTS,
    NUM_BINS,
    PRIOR,
    PROPOSAL_WIDTH,
    check_count,
)
from lowlat.kernels.reference.speculation.ngram_draft import check_batch
from lowlat.kernels.reference.speculation.suffix_draft import SHARE
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = ["choose_drafts", "examples"]

THREADS = 64
NUM_PROBABILITIES = 4 * NUM_BINS
PRIORS = tuple(number for rates in PRIOR for entry in rates for number in entry)
TEXT, PROMISES = FIRST + MAX_DRAFTS, FIRST + 2 * MAX_DRAFTS


@launches(reference.choose_drafts)
def choose_drafts(given: Given) -> list[KernelCall]:
    """Learn from the last proposals and choose, as the reference's `choose_drafts`.

    Time: three trips to memory and some 30 short divisions in a row. Raises ShapeError for too many drafts.
    """
    batch, rows, context = given.sizes("B", "T", "C")
    check_batch(given["tokens"], batch)
    check_count(rows)
    return [KernelCall(_make(context, rows, given.params["fresh"]), (batch, 1, 1), given.tensors)]


@device_function
def _text_bin(match: Any, place: Any) -> Any:
    return max(int64(0), min(match + place, int64(NUM_BINS)) - 1)


@device_function
def _learn(source: Any, length: Any, came: Any, before: Any, probabilities: Any) -> None:
    """Compare a source's last drafts with the tokens that came since, up to the first that was wrong.

    came, before  the tokens after where the proposal was made, and the proposal; acceptance probabilities: updated
    """
    start, match = int64(before[MADE_AT]), int64(before[MATCH])
    place, going = int64(0), start > 0
    while going and place < MAX_DRAFTS:
        draft = before[FIRST + source * MAX_DRAFTS + place]
        going = start + place < length and draft >= 0
        if going:
            going = draft == came[place]
            kind = _text_bin(match, place) if source == 1 else place
            at = 2 * (source * NUM_BINS + kind)
            promise = int64(before[PROMISES + place]) if source == 1 else int64(SHARE)
            right, promised = int64(probabilities[at]), int64(probabilities[at + 1])
            probabilities[at] = int32(right - (right >> DECAY) + (int64(SHARE) if going else int64(0)))
            probabilities[at + 1] = int32(promised - (promised >> DECAY) + promise)
            place += 1


@device_function
def _expected(source: Any, count: Any, now: Any, probabilities: Any) -> Any:
    """How many of a source's new drafts will be accepted, in 1024ths."""
    match, product, total = int64(now[MATCH]), int64(SHARE), int64(0)
    place, going = int64(0), True
    while going and place < count:
        going = now[FIRST + source * MAX_DRAFTS + place] >= 0
        if going:
            kind = _text_bin(match, place) if source == 1 else place
            at = 2 * (source * NUM_BINS + kind)
            promise = int64(now[PROMISES + place]) if source == 1 else int64(SHARE)
            rate, _ = divide(int64(probabilities[at]) * SHARE, max(int64(probabilities[at + 1]), int64(1)))
            odd, _ = divide(min(rate, int64(SHARE)) * promise, int64(SHARE))
            product, _ = divide(product * odd, int64(SHARE))
            total += product
            place += 1
    return total


@device_function
def _proposal(thread: Any, count: Any, index: Any, rows: Any, length: Any, given: Any) -> Any:
    """A number of the new proposal."""
    draft_nodes, text_nodes, draft_shares, match_lens = given
    number = int64(-1)
    if thread == MADE_AT:
        number = length
    elif thread == MATCH:
        number = int_at(match_lens, index)
    elif thread >= FIRST:
        kind, place = divide(thread - FIRST, int64(MAX_DRAFTS))
        if place < count:
            node = index * rows + 1 + place
            if kind == 0:
                number = int_at(draft_nodes, node)
            elif kind == 1:
                number = int_at(text_nodes, node)
            else:
                share, before = int_at(draft_shares, node), int64(SHARE)
                if place > 0:
                    before = int_at(draft_shares, node - 1)
                number, _ = divide(share * SHARE, max(before, int64(1)))
    return number


@cache
def _make(context: int, rows: int, fresh: bool) -> Kernel:
    """Specialised by C, T and whether the requests are new."""
    count = rows - 1

    def kernel(
        tokens: Any,
        slots: Any,
        draft_live: Any,
        draft_lens: Any,
        text_nodes: Any,
        draft_shares: Any,
        match_lens: Any,
        draft_nodes: Any,
        proposals: Any,
        draft_probabilities: Any,
        draft_sources: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        before = cuda.shared.array(shape=PROPOSAL_WIDTH, dtype=int32)
        now = cuda.shared.array(shape=PROPOSAL_WIDTH, dtype=int32)
        probabilities = cuda.shared.array(shape=NUM_PROBABILITIES, dtype=int32)
        came = cuda.shared.array(shape=MAX_DRAFTS, dtype=int32)
        index, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        slot, live, length = int_at(slots, index), byte_at(draft_live, index), int_at(draft_lens, index)
        if slot < 0 or live == 0:
            return
        text, kept, own = tokens + slot * (context * 4), slot * PROPOSAL_WIDTH, slot * NUM_PROBABILITIES
        if thread < PROPOSAL_WIDTH:
            given = (draft_nodes, text_nodes, draft_shares, match_lens)
            now[thread] = int32(_proposal(thread, count, index, rows, length, given))
            before[thread] = int32(int_at(proposals, kept + thread))
        if thread < MAX_DRAFTS:
            start = int_at(proposals, kept + MADE_AT)
            at = max(int64(0), min(start + thread, length - 1))
            came[thread] = int32(int_at(text, at))
        if thread < NUM_PROBABILITIES:
            probabilities[thread] = int32(PRIORS[thread]) if fresh else int32(int_at(draft_probabilities, own + thread))
        cuda.syncthreads()
        if thread == 0:
            if not fresh:
                _learn(int64(0), length, came, before, probabilities)
                _learn(int64(1), length, came, before, probabilities)
            of_model, of_text = (
                _expected(int64(0), count, now, probabilities),
                _expected(int64(1), count, now, probabilities),
            )
            now[CHOSEN] = int32(1) if of_text > of_model else int32(0)
        cuda.syncthreads()
        if thread < PROPOSAL_WIDTH:
            set_int(proposals, kept + thread, int64(now[thread]))
        if thread < NUM_PROBABILITIES:
            set_int(draft_probabilities, own + thread, int64(probabilities[thread]))
        if thread == 0:
            set_int(draft_sources, slot, int64(now[CHOSEN]))
        if now[CHOSEN] == 1 and thread < count:
            set_int(draft_nodes, index * rows + 1 + thread, int64(now[TEXT + thread]))

    name = f"choose_drafts_{context}_{rows}_{'fresh' if fresh else 'known'}"
    return Kernel(name, kernel, (types.int64,) * 11, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: a step's, and a prompt's."""
    return [_make(131072, 8, False), _make(8191, 5, True)]
