"""This module has `ngram_draft` of the reference as a kernel, which copies drafts from a slot's text; a block a slot.

All threads compare every position of the text with the suffix's last token, with many loads in flight. Only at matches
are the tokens before it compared.
"""

from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, divide, int_at, set_int
from lowlat.kernels.reference.speculation import ngram_draft as reference
from lowlat.kernels.reference.speculation.ngram_draft import check_batch, check_matches
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = ["examples", "ngram_draft"]

THREADS = 1024
LOADS = 8  # of each thread under way at a time
LENGTH_BIT = 24  # of a match's key: its length above where the text goes on after it; a context has 2**20 at most


@launches(reference.ngram_draft)
def ngram_draft(given: Given) -> list[KernelCall]:
    """Draft what followed the longest suffix of the text, as the reference's `ngram_draft`.

    Time: 4 bytes a position by one SM, 32 KiB of them under way: a trip to memory for 8192 positions, some
    8 us for 131072 (of its 64 bytes a clock). Raises ShapeError for lengths that do not fit.
    """
    batch, rows, context = given.sizes("B", "T", "C")
    lengths = (given.params["min_match"], given.params["max_match"])
    check_batch(given["tokens"], batch)
    check_matches(*lengths)
    return [KernelCall(_make(context, rows, *lengths), (batch, 1, 1), given.tensors)]


@device_function
def _key(text: Any, place: Any, ending: Any, longest: Any) -> Any:
    """The key of the match that ends with a position's token, which is the suffix's last.

    text    the address of the text's first token
    ending  the text's last tokens, the last first
    """
    count, going = int64(1), True
    for back in range(1, longest):
        if going:
            going = place >= back and int_at(text, place - back) == ending[back]
            if going:
                count += 1
    return (count << LENGTH_BIT) + place + 1


@device_function
def _bit(number: Any, token: Any, end: Any) -> Any:
    return int64(1) << number if token == end else int64(0)


@device_function
def _search(thread: Any, text: Any, last: Any, ending: Any, longest: Any) -> Any:
    """The largest key among this thread's positions, those up to `last`, at which several of them may look; or 0."""
    found, place, end = int64(0), thread, ending[0]
    while place <= last:
        b, c, d = min(place + THREADS, last), min(place + THREADS * 2, last), min(place + THREADS * 3, last)
        e, f, g = min(place + THREADS * 4, last), min(place + THREADS * 5, last), min(place + THREADS * 6, last)
        h = min(place + THREADS * 7, last)
        first, second, third, fourth = int_at(text, place), int_at(text, b), int_at(text, c), int_at(text, d)
        fifth, sixth, seventh, eighth = int_at(text, e), int_at(text, f), int_at(text, g), int_at(text, h)
        hits = _bit(0, first, end) | _bit(1, second, end) | _bit(2, third, end) | _bit(3, fourth, end)
        hits |= _bit(4, fifth, end) | _bit(5, sixth, end) | _bit(6, seventh, end) | _bit(7, eighth, end)
        at = place
        while hits != 0:  # seldom, and so its code is there once
            if hits & 1 == 1:
                found = max(found, _key(text, min(at, last), ending, longest))
            hits >>= 1
            at += THREADS
        place += THREADS * LOADS
    return found


@cache
def _make(context: int, rows: int, shortest: int, longest: int) -> Kernel:
    """Specialised by C, T and the lengths of matches."""
    least = shortest << LENGTH_BIT

    def kernel(tokens: Any, slots: Any, draft_live: Any, draft_lens: Any, draft_nodes: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        ending = cuda.shared.array(shape=longest, dtype=int64)
        best = cuda.shared.array(shape=1, dtype=int32)
        index, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        slot, live, length = int_at(slots, index), byte_at(draft_live, index), int_at(draft_lens, index)
        drafting = slot >= 0 and live != 0
        text = tokens + max(slot, int64(0)) * (context * 4)
        if thread < longest:
            ending[thread] = int_at(text, length - 1 - thread) if drafting and thread < length else int64(-1)
        if thread == 0:
            best[0] = 0
        cuda.syncthreads()
        if drafting:
            found = _search(thread, text, length - 2, ending, longest)
            if found >= least and found > best[0]:  # what another thread writes meanwhile is larger, too
                cuda.atomic.max(best, 0, int32(found))
        cuda.syncthreads()
        if thread < rows:
            token, key = int64(-1), int64(best[0])
            if key > 0 and thread > 0:
                start = key & int64((1 << LENGTH_BIT) - 1)
                _, offset = divide(thread - 1, length - start)
                token = int_at(text, start + offset)
            set_int(draft_nodes, index * rows + thread, token)

    name = f"ngram_draft_{context}_{rows}_{shortest}_{longest}"
    return Kernel(name, kernel, (types.int64,) * 5, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: the default lengths, and the longest matches over an odd context."""
    return [_make(131072, 5, 2, 4), _make(8191, 8, 1, 16)]
