"""This module has `suffix_draft` of the reference as a kernel, which drafts from a slot's own text; a block a slot.

All threads search the text's last token, a tile of positions at a time from the end on, and compare the tokens before
it at matches. After each tile only the best matches so far are kept, so that few of the next tile can be better. Then a
warp takes each length of an ending, and a lane each of its places.
"""

from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, divide, int_at, set_int
from lowlat.kernels.reference.speculation import suffix_draft as reference
from lowlat.kernels.reference.speculation.ngram_draft import check_batch
from lowlat.kernels.reference.speculation.suffix_draft import SAMPLES, SHARE, check_options, fractions
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint32

__all__ = ["KEY_BITS", "LENGTH_BIT", "LOADS", "PLACE", "THREADS", "examples", "gather_matches", "suffix_draft"]

THREADS = 1024
LOADS = 8  # of each thread under way at a time
LENGTH_BIT = 24  # of a match's key: its length above where the text goes on after it; a context has 2**20 at most
KEY_BITS = 30
DEPTH_BIT = 6  # of an ending's score: its length below
PLACE = (1 << LENGTH_BIT) - 1


@launches(reference.suffix_draft)
def suffix_draft(given: Given) -> list[KernelCall]:
    """Draft the likeliest continuation of an ending, as the reference's `suffix_draft`.

    Time: 4 bytes a position by one SM, 32 KiB of them under way: a trip to memory for 8192 positions; then
    one more. Raises ShapeError for lengths and options that do not fit.
    """
    batch, rows, context = given.sizes("B", "T", "C")
    max_depth, *shares = (given.params[name] for name in ("max_depth", "max_spec_factor", "min_token_prob"))
    check_batch(given["tokens"], batch)
    check_options(max_depth, *shares)
    return [KernelCall(_make(context, rows, max_depth, *fractions(*shares)), (batch, 1, 1), given.tensors)]


@device_function
def _keep(text: Any, place: Any, ending: Any, depth: Any, floor: Any, keys: Any, held: Any) -> None:
    """Keep the match that ends with a position's token, which is the text's last, if its key is above the floor."""
    count = int64(1)
    while count < depth and place >= count and int_at(text, place - count) == ending[count]:
        count += 1
    key = (count << LENGTH_BIT) + place + 1
    if key > floor:
        keys[cuda.atomic.add(held, 0, 1)] = int32(key)


@device_function
def _token(text: Any, place: Any) -> Any:
    return ptx.load_global_i32(text + place * 4)


@device_function
def _bit(number: Any, token: Any, end: Any, place: Any) -> Any:
    return int32(1 << number) if token == end and place >= 0 else int32(0)


@device_function
def _search(text: Any, place: Any, ending: Any, depth: Any, floor: Any, keys: Any, held: Any) -> None:
    """Keep the matches of a tile that end at a position and so many threads' strides before it."""
    end, zero, step = int32(ending[0]), int64(0), int64(THREADS)
    b, c, d, e = place - step, place - step * 2, place - step * 3, place - step * 4
    f, g, h = place - step * 5, place - step * 6, place - step * 7
    first, second = _token(text, max(place, zero)), _token(text, max(b, zero))
    third, fourth = _token(text, max(c, zero)), _token(text, max(d, zero))
    fifth, sixth = _token(text, max(e, zero)), _token(text, max(f, zero))
    seventh, eighth = _token(text, max(g, zero)), _token(text, max(h, zero))
    hits = _bit(0, first, end, place) | _bit(1, second, end, b) | _bit(2, third, end, c) | _bit(3, fourth, end, d)
    hits |= _bit(4, fifth, end, e) | _bit(5, sixth, end, f) | _bit(6, seventh, end, g) | _bit(7, eighth, end, h)
    at = place
    while hits != 0:  # seldom, and so its code is there once
        if hits & 1 == 1:
            _keep(text, at, ending, depth, floor, keys, held)
        hits >>= 1
        at -= step


@device_function
def _select(thread: Any, keys: Any, count: Any, held: Any, kept: Any, tallies: Any) -> Any:
    """Cut the keys, of which there are more, to the SAMPLES largest; returns the least of these, found bit by bit."""
    if thread < KEY_BITS:
        tallies[thread] = 0
    if thread == 0:
        held[0] = 0
    cuda.syncthreads()
    floor, bit = int64(0), int64(KEY_BITS - 1)
    while bit >= 0:
        tried, above = floor | (int64(1) << bit), 0
        for place in range(thread, count, THREADS):
            if keys[place] >= tried:
                above += 1
        if above > 0:
            cuda.atomic.add(tallies, bit, above)
        cuda.syncthreads()
        if tallies[bit] >= SAMPLES:
            floor = tried
        bit -= 1
    for place in range(thread, count, THREADS):
        if keys[place] >= floor:
            kept[cuda.atomic.add(held, 0, 1)] = keys[place]
    cuda.syncthreads()
    if thread < SAMPLES:
        keys[thread] = kept[thread]
    cuda.syncthreads()
    return floor


@device_function
def gather_matches(thread: Any, text: Any, last: Any, ending: Any, depth: Any, shared: Any) -> Any:
    """Fill the first of `keys` with the largest of the text, at most SAMPLES and in any order; returns their number."""
    keys, held, kept, tallies = shared
    count, floor, top = int64(0), int64(0), last
    while top >= 0:
        _search(text, top - thread, ending, depth, floor, keys, held)
        cuda.syncthreads()
        count = int64(held[0])
        cuda.syncthreads()  # before anyone adds to it
        if count > SAMPLES:
            floor, count = _select(thread, keys, count, held, kept, tallies), int64(SAMPLES)
        top -= THREADS * LOADS
    return count


@device_function
def _follow(lane: Any, reach: Any, place: Any, ending: Any, most: Any, least: Any, lists: Any, at: Any) -> Any:
    """Draft after an ending: for a whole warp, a place a lane.

    most   drafts at most
    lists  shared: the tokens that follow each place; out, from `at` on: the drafts, and how many places had them
    Returns the sum of the shares in 65536ths, how many places there are, and how many drafts.
    """
    following, drafts, often = lists
    going_on = reach >= ending
    whole = int64(ptx.count_bits(ptx.ballot(uint32(1) if going_on else uint32(0))))
    total, number = int64(0), int64(0)
    while number < most and whole > 0:
        token = int64(-1)
        if going_on:
            token = int64(following[number * SAMPLES + lane])
        equal = int64(ptx.count_bits(ptx.lanes_of_same(uint32(token))))
        mine = (equal << LENGTH_BIT) + place if going_on else int64(0)
        best = int64(ptx.warp_max(uint32(mine)))
        count = best >> LENGTH_BIT
        if (count << 16) < least * whole:
            most = number
        else:
            chosen = int64(ptx.warp_max(uint32(token + 1) if mine == best else uint32(0))) - 1
            going_on = going_on and token == chosen
            drafts[at + number], often[at + number] = int32(chosen), int32(count)
            total += count
            number += 1
    score, _ = divide(total << 16, max(whole, int64(1)))
    return score, whole, number


@cache
def _make(context: int, rows: int, depth: int, factor: int, least: int) -> Kernel:
    """Specialised by C, T and the options."""
    num_keys, num_warps = THREADS * LOADS + SAMPLES, THREADS // 32
    drafted = max(1, rows - 1)
    table, num_following = depth * drafted, SAMPLES * drafted

    def kernel(
        tokens: Any, slots: Any, draft_live: Any, draft_lens: Any, draft_nodes: Any, draft_shares: Any, match_lens: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        ending = cuda.shared.array(shape=depth, dtype=int64)
        keys = cuda.shared.array(shape=num_keys, dtype=int32)
        held = cuda.shared.array(shape=1, dtype=int32)
        kept = cuda.shared.array(shape=SAMPLES, dtype=int32)
        tallies = cuda.shared.array(shape=KEY_BITS, dtype=int32)
        scores = cuda.shared.array(shape=32, dtype=int32)
        wholes = cuda.shared.array(shape=32, dtype=int32)
        counts = cuda.shared.array(shape=32, dtype=int32)
        following = cuda.shared.array(shape=num_following, dtype=int32)
        drafts = cuda.shared.array(shape=table, dtype=int32)
        often = cuda.shared.array(shape=table, dtype=int32)
        index, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        slot, live, length = int_at(slots, index), byte_at(draft_live, index), int_at(draft_lens, index)
        text = tokens + max(slot, int64(0)) * (context * 4)
        best = uint32(0)
        if slot >= 0 and live != 0:
            if thread < depth:
                ending[thread] = int_at(text, length - 1 - thread) if thread < length else int64(-1)
            if thread < 32:
                scores[thread] = 0
            if thread == 0:
                held[0] = 0
            cuda.syncthreads()
            count = gather_matches(thread, text, length - 2, ending, depth, (keys, held, kept, tallies))
            for number in range(thread, num_following, THREADS):
                if number & 31 < count:
                    place = int64(keys[number & 31]) & PLACE
                    _, offset = divide(number >> 5, length - place)
                    following[number] = int32(int_at(text, place + offset))
            cuda.syncthreads()
            lane, ordinal = thread & 31, thread >> 5
            key = int64(keys[lane]) if lane < count else int64(0)
            while ordinal < depth:
                most = min(int64(rows - 1), (ordinal + 1) * factor >> 16)
                at = ordinal * drafted
                score, whole, number = _follow(
                    lane, key >> LENGTH_BIT, key & PLACE, ordinal + 1, most, least, (following, drafts, often), at
                )
                if lane == 0:
                    scores[ordinal], wholes[ordinal], counts[ordinal] = int32(score), int32(whole), int32(number)
                ordinal += num_warps
            cuda.syncthreads()
            if thread < 32:
                score = int64(scores[thread])
                best = ptx.warp_max(uint32((score << DEPTH_BIT) + thread) if score > 0 else uint32(0))
        if thread < rows:
            chosen, token, share = int64(best) & ((1 << DEPTH_BIT) - 1), int64(-1), int64(0)
            if best != 0 and thread > 0 and thread <= counts[chosen]:
                at = chosen * drafted + thread - 1
                token = int64(drafts[at])
                share, _ = divide(int64(often[at]) * SHARE, int64(wholes[chosen]))
            set_int(draft_nodes, index * rows + thread, token)
            set_int(draft_shares, index * rows + thread, share)
            if thread == 0:
                set_int(match_lens, index, chosen + 1 if best != 0 else int64(0))

    name = f"suffix_draft_{context}_{rows}_{depth}_{factor}_{least}"
    return Kernel(name, kernel, (types.int64,) * 7, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: the default options, the longest endings in an odd context, and a wide step."""
    return [
        _make(131072, 5, 24, *fractions(1.0, 0.1)),
        _make(8191, 8, 32, *fractions(2.5, 0.0)),
        _make(131072, 32, 32, *fractions(4.0, 0.1)),
    ]
