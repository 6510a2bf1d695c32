"""This module launches the start of a wide step, and drafts from texts that requests name, each in one launch.

The search is that of `suffix_draft`, but the texts are in the host's memory, which is read over the bus.
"""

from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, int_at, set_byte, set_int
from lowlat.kernels.reference.speculation import proposals as reference
from lowlat.kernels.reference.speculation.ngram_draft import check_batch
from lowlat.kernels.reference.speculation.proposals import check_texts
from lowlat.kernels.reference.speculation.suffix_draft import SAMPLES, SHARE, fractions
from lowlat.kernels.reference.step.slots import FROM_TEXT
from lowlat.kernels.speculation.suffix_draft import KEY_BITS, LENGTH_BIT, LOADS, PLACE, THREADS, gather_matches
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, int32, int64, types, uint32

__all__ = ["draft_from_texts", "examples", "open_proposals"]

OPEN_THREADS = 32
NOTHING = -2  # before a text's first token: no token, and no end of a text


@launches(reference.open_proposals)
def open_proposals(given: Given) -> list[KernelCall]:
    """List the slots that propose, as the reference's `open_proposals`. Time: two trips to memory."""
    (batch,) = given.sizes("B")
    return [KernelCall(_make_opening(batch, int(given.params["source"] == FROM_TEXT)), (1, 1, 1), given.tensors)]


@launches(reference.draft_from_texts)
def draft_from_texts(given: Given) -> list[KernelCall]:
    """Draft from named texts, as the reference's `draft_from_texts`.

    Time: 4 bytes a token of the texts over the bus, 32 KiB of them under way; nothing of a slot without texts. Raises
    ShapeError for lengths and options that do not fit.
    """
    batch, rows, context, size = given.sizes("B", "T", "C", "D")
    max_depth, max_spec_factor = (given.params[name] for name in ("max_depth", "max_spec_factor"))
    check_batch(given["tokens"], batch)
    check_texts(rows, size, max_depth, max_spec_factor)
    factor, _ = fractions(max_spec_factor, 0.0)
    return [KernelCall(_make_search(context, size, rows, max_depth, factor), (batch, 1, 1), given.tensors)]


@cache
def _make_opening(batch: int, from_text: int) -> Kernel:
    """Specialised by B and what the drafts' source is."""

    def kernel(slots: Any, lengths: Any, draft_live: Any, draft_lens: Any, draft_sources: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index = int64(cuda.threadIdx.x)
        if index < batch:
            slot, length = int_at(slots, index), int64(0)
            if slot >= 0:
                length = int_at(lengths, slot)
                set_int(draft_sources, slot, int64(from_text))
            set_byte(draft_live, index, int64(1) if slot >= 0 else int64(0))
            set_int(draft_lens, index, length)

    return Kernel(f"open_proposals_{batch}_{from_text}", kernel, (types.int64,) * 5, OPEN_THREADS)


@cache
def _make_search(context: int, size: int, rows: int, depth: int, factor: int) -> Kernel:
    """Specialised by C, D, T and the options."""
    num_keys = THREADS * LOADS + SAMPLES

    def kernel(
        tokens: Any,
        slots: Any,
        draft_live: Any,
        draft_lens: Any,
        draft_texts: Any,
        draft_text_lens: Any,
        draft_nodes: Any,
        draft_shares: Any,
        match_lens: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        ending = cuda.shared.array(shape=depth, dtype=int64)
        keys = cuda.shared.array(shape=num_keys, dtype=int32)
        held = cuda.shared.array(shape=1, dtype=int32)
        kept = cuda.shared.array(shape=SAMPLES, dtype=int32)
        tallies = cuda.shared.array(shape=KEY_BITS, dtype=int32)
        found = cuda.shared.array(shape=1, dtype=int32)
        index, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        slot, live, length = int_at(slots, index), byte_at(draft_live, index), int_at(draft_lens, index)
        if slot < 0 or live == 0:
            return
        known, own = int_at(draft_text_lens, slot), int_at(match_lens, index)
        if known < 2:
            return
        text, written = draft_texts + slot * (size * 4), tokens + slot * (context * 4)
        if thread < depth:
            ending[thread] = int_at(written, length - 1 - thread) if thread < length else int64(NOTHING)
        if thread == 0:
            held[0] = 0
        cuda.syncthreads()
        count = gather_matches(thread, text, known - 2, ending, depth, (keys, held, kept, tallies))
        if thread < 32:
            # what ends with its text is followed by nothing
            key = int64(keys[thread]) if thread < count else int64(0)
            if key > 0 and int_at(text, key & PLACE) < 0:
                key = int64(0)
            best = ptx.warp_max(uint32(key))
            if thread == 0:
                found[0] = int32(best)
        cuda.syncthreads()
        match, place = int64(found[0]) >> LENGTH_BIT, int64(found[0]) & PLACE
        if match <= own:
            return
        if thread < 32:
            token = int64(-1)
            if thread > 0 and thread <= match * factor >> 16 and place + thread <= known:
                token = int_at(text, place + thread - 1)
            ends = int64(ptx.ballot(uint32(1) if thread > 0 and token < 0 else uint32(0)))
            going = thread > 0 and ends & ((int64(2) << thread) - 1) == 0
            if thread < rows:
                set_int(draft_nodes, index * rows + thread, token if going else int64(-1))
                set_int(draft_shares, index * rows + thread, int64(SHARE) if going else int64(0))
            if thread == 0:
                set_int(match_lens, index, match)

    name = f"draft_from_texts_{context}_{size}_{rows}_{depth}_{factor}"
    return Kernel(name, kernel, (types.int64,) * 9, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: a step's and a wide step's, by the default options and the longest endings."""
    opening = [_make_opening(1, 0), _make_opening(4, 1)]
    return [
        *opening,
        _make_search(131072, 32768, 5, 24, *fractions(1.0, 0.0)[:1]),
        _make_search(8191, 8193, 32, 32, *fractions(4.0, 0.0)[:1]),
    ]
