"""The target's draw at every live node, and whether its logits are finite, in two launches of one block a chunk.

The first processes each chunk and finds its largest. The second finds the row's among them, which ends a greedy row
in its first block, and its other blocks leave at once; elsewhere it processes the chunk again, finds the bounds of
top_k and top_p where they are set, adds noise, and finds the largest. Order and roundings are those of
`kernels.reference.sample`. A draw depends on nothing but its own row, its slot's state and its position. What the
step's first kernel settled (slots and their state) is read before the kernel before this one has ended.
"""

import functools
import math
from typing import Any

import torch

from lowlat.kernels.cutoff import BINS, PASSES, TALLY_WORDS, clear_masses, make_find_bound, odds
from lowlat.kernels.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.logit_history import draw_position, make_apply_history, read_wishes, touches
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32
from lowlat.kernels.philox import philox, uniform
from lowlat.kernels.ptx import (
    add_rn,
    bits_of_float,
    div_rn,
    float_of_bits,
    let_next_kernel_start,
    load_shared_128,
    shared_address,
    store_global_64,
    store_global_u32,
    wait_for_previous_kernel,
)
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.slot_record import (
    MAX_BIASES,
    MAX_STOPS,
    MIN_P,
    NUM_FLOATS,
    NUM_INTS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from lowlat.kernels.select import (
    BROKEN,
    CHUNK,
    FINITE,
    GROUPS,
    MINUS_INFINITY,
    MINUS_INFINITY_KEY,
    STRIDE,
    THREADS,
    WARPS,
    best_partial,
    better,
    block_best,
    copies_wait_all,
    count_chunks,
    index_of_low,
    load_words,
    make_own_words,
    make_stage,
    row_best,
    store_words,
    value_of_key,
    words_best,
    words_broken,
)

__all__ = ["examples", "sample"]

PAIRS = 2 * WARPS
SUMS = WARPS + 2
MAGNITUDE = 0x7FFFFFFF
TABLES = 2 * PASSES  # top_k's and top_p's
COUNTERS = 2  # arrivals of a row's blocks, and their barrier
BYTES = types.Array(types.uint8, 1, "C")
INTS = types.Array(types.int32, 1, "C")
INTS_2D = types.Array(types.int32, 2, "C")
LONGS = types.Array(types.int64, 1, "C")
LONGS_2D = types.Array(types.int64, 2, "C")
LONGS_3D = types.Array(types.int64, 3, "C")
FLOATS = types.Array(types.float32, 1, "C")
FLOATS_2D = types.Array(types.float32, 2, "C")
# lengths, slot_ints, slot_floats, prompt_seen, output_counts, bias_ids, bias_values, stop_ids
STATE = (INTS, LONGS_2D, FLOATS_2D, types.int64, types.int64, INTS_2D, FLOATS_2D, INTS_2D)


def sample(
    logits: torch.Tensor,
    row_live: torch.Tensor,
    row_tokens: torch.Tensor,
    row_masks: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    slot_floats: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    stop_ids: torch.Tensor,
    *,
    target_tokens: torch.Tensor,
    finite: torch.Tensor,
    workspace: Workspace,
) -> list[KernelCall]:
    """Flag the rows whose logits are finite and draw the target's token at every live node.

    Arguments are those of the reference's `sample`, and finite [B, T] uint8, out: 1 for a live row without NaN or
    infinity. target_tokens is -1 for a dead row or a pad slot, 0 where logits are not finite.
    Time: greedy rows are read once, others twice. Raises ShapeError for shapes that do not fit, V above 262144, and
    T above 64.
    """
    batch, rows = target_tokens.shape
    count, width, slot_count = batch * rows, prompt_seen.shape[1], lengths.shape[0]
    check_shape("logits", logits, count, width)
    for name, array in (("row_tokens", row_tokens), ("row_masks", row_masks), ("finite", finite)):
        check_shape(name, array, batch, rows)
    check_shape("slots", slots, batch)
    check_shape("target_tokens", target_tokens, batch, min(rows, 64))
    live = row_live.reshape(-1)
    check_shape("row_live", live, count)
    for name, array, columns in (
        ("slot_ints", slot_ints, NUM_INTS),
        ("slot_floats", slot_floats, NUM_FLOATS),
        ("prompt_seen", prompt_seen, width),
        ("output_counts", output_counts, width),
        ("bias_ids", bias_ids, MAX_BIASES),
        ("bias_values", bias_values, MAX_BIASES),
        ("stop_ids", stop_ids, MAX_STOPS),
    ):
        check_shape(name, array, slot_count, columns)
    chunks = count_chunks("logits", width)
    state = (lengths, slot_ints, slot_floats, prompt_seen, output_counts, bias_ids, bias_values, stop_ids)
    largest = workspace(f"sample.largest.{count}.{chunks}", (count, chunks, 2), torch.int32)
    drawn = workspace(f"sample.drawn.{count}.{chunks}", (count, chunks, 2), torch.int32)
    counters = workspace(f"sample.counters.{count}", (count, COUNTERS), torch.int32)
    masses = workspace(f"sample.masses.{count}", (count, TABLES, BINS), torch.int64)
    row = (logits, live, row_tokens, row_masks.reshape(-1), slots, *state, largest)
    chosen = (target_tokens.reshape(-1), finite.reshape(-1))
    grid = (chunks, count, 1)
    return [
        KernelCall(_make_choose(width, rows), grid, row),
        KernelCall(_make_draw(width, rows), grid, (*row, *chosen, drawn, counters, masses)),
    ]


@functools.cache
def _make_choose(width: int, rows: int) -> Kernel:
    """The first launch, specialised by V and T."""
    chunks = count_chunks("logits", width)
    own_words, apply_history = make_own_words(width), make_apply_history(width, rows)

    def choose_kernel(
        logits: Any,
        row_live: Any,
        row_tokens: Any,
        row_masks: Any,
        slots: Any,
        lengths: Any,
        slot_ints: Any,
        slot_floats: Any,
        prompt_seen: Any,
        output_counts: Any,
        bias_ids: Any,
        bias_values: Any,
        stop_ids: Any,
        largest: Any,
    ) -> None:
        let_next_kernel_start()
        staged = cuda.shared.array(CHUNK, types.uint32, alignment=16)
        pairs = cuda.shared.array(PAIRS, types.uint32)
        base = shared_address(staged)
        chunk, row = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        first, index = chunk * CHUNK, row // rows
        slot, mask = int64(slots[index]), row_masks[row]
        live = (slot >= 0) & (row_live[row] != 0)
        slot = max(slot, 0)
        wishes = read_wishes(slot, mask, lengths, slot_ints, slot_floats, bias_ids, stop_ids)
        wait_for_previous_kernel()
        if not live:
            return
        words = own_words(logits + row * (4 * width), first, uint32(MINUS_INFINITY))
        broken = words_broken(words, first, width, uint32(FINITE))
        if touches(wishes, first):
            store_words(base, words)
            tokens = row_tokens + index * (4 * rows)
            apply_history(
                staged, first, slot, wishes, tokens, mask, prompt_seen, output_counts, bias_ids, bias_values, stop_ids
            )
            words = load_words(base)
        key, low = words_best(words, first)
        if broken:
            key = uint32(BROKEN)
        key, low = block_best(key, low, pairs)
        if cuda.threadIdx.x == 0:
            store_global_64(largest + 8 * (row * chunks + chunk), key, low)

    signature = (types.int64, BYTES, types.int64, LONGS, INTS, *STATE, types.int64)
    # five blocks on a multiprocessor: a tree of 40 rows then takes two waves, not three
    return Kernel(
        f"sample_choose_{width}_{rows}", choose_kernel, signature, THREADS, min_blocks=5 if width % 4 == 0 else 1
    )


@device_function
def _whole_best(partials: Any, chunks: Any, pairs: Any) -> Any:
    """The best pair of a row from those of its chunks, the same in every thread of the block.

    partials  address of the row's [chunks, 2] uint32; pairs: as in `block_best`
    """
    thread = cuda.threadIdx.x
    if thread < 32:
        key, low = best_partial(partials, chunks)
        if thread == 0:
            pairs[0], pairs[1] = key, low
    cuda.syncthreads()
    return pairs[0], pairs[1]


@device_function
def _scale(chunk: Any, largest: Any, temperature: Any) -> None:
    """Turn a chunk's logits, which all threads see, into (logit - largest) / temperature, each operation rounded."""
    for part in range(CHUNK // THREADS):
        place = part * THREADS + cuda.threadIdx.x
        below = add_rn(float_of_bits(chunk[place]), -largest)
        chunk[place] = bits_of_float(div_rn(below, temperature))


@device_function
def _noisier(key: Any, low: Any, bits: Any, index: Any, word: Any, bound: Any, min_p: Any) -> Any:
    """The better of a pair and a token with its noise, if the token may be drawn."""
    if uint32(bits & uint32(MAGNITUDE)) > bound or (min_p > float32(0.0) and odds(bits) < min_p):
        return key, low
    noise = -float32(math.log(-float32(math.log1p(-uniform(word)))))
    return better(key, low, bits_of_float(add_rn(float_of_bits(bits), noise)), index)


@device_function
def _own_draw(staged: Any, first: Any, bound: Any, min_p: Any, seed: Any, position: Any) -> Any:
    """The best pair of logits and noise among the tokens that a thread owns."""
    key, low = uint32(0), uint32(0)
    low_seed, high_seed = uint32(seed & 0xFFFFFFFF), uint32((seed >> 32) & 0xFFFFFFFF)
    for group in range(cuda.blockDim.x // (THREADS // GROUPS)):  # not a constant: copies would cost registers
        place = int64(group * STRIDE + 4 * cuda.threadIdx.x)
        a, b, c, d = load_shared_128(uint32(staged + 4 * place))
        index = first + place
        nearest = min(min(uint32(a & uint32(MAGNITUDE)), uint32(b & uint32(MAGNITUDE))), uint32(c & uint32(MAGNITUDE)))
        if min(nearest, uint32(d & uint32(MAGNITUDE))) <= bound:
            words = philox(uint32(position), uint32(index >> 2), uint32(0), uint32(0), low_seed, high_seed)
            key, low = _noisier(key, low, a, index, words[0], bound, min_p)
            key, low = _noisier(key, low, b, index + 1, words[1], bound, min_p)
            key, low = _noisier(key, low, c, index + 2, words[2], bound, min_p)
            key, low = _noisier(key, low, d, index + 3, words[3], bound, min_p)
    return key, low


@functools.cache
def _make_draw(width: int, rows: int) -> Kernel:
    """The second launch, specialised by V and T."""
    chunks = count_chunks("logits", width)
    stage, apply_history, find_bound = make_stage(width), make_apply_history(width, rows), make_find_bound(chunks)

    def draw_kernel(
        logits: Any,
        row_live: Any,
        row_tokens: Any,
        row_masks: Any,
        slots: Any,
        lengths: Any,
        slot_ints: Any,
        slot_floats: Any,
        prompt_seen: Any,
        output_counts: Any,
        bias_ids: Any,
        bias_values: Any,
        stop_ids: Any,
        largest: Any,
        target_tokens: Any,
        finite: Any,
        drawn: Any,
        counters: Any,
        masses: Any,
    ) -> None:
        let_next_kernel_start()
        staged = cuda.shared.array(CHUNK, types.uint32, alignment=16)
        tally = cuda.shared.array(TALLY_WORDS, types.uint32)
        sums = cuda.shared.array(SUMS, types.int64)
        pairs = cuda.shared.array(PAIRS, types.uint32)
        base = shared_address(staged)
        chunk, row, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), cuda.threadIdx.x
        first, index = chunk * CHUNK, row // rows
        slot, mask = int64(slots[index]), row_masks[row]
        live = (slot >= 0) & (row_live[row] != 0)
        slot = max(slot, 0)
        temperature = slot_floats[slot, TEMPERATURE]
        drawing = live & (temperature != 0.0)
        if not drawing and chunk != 0:
            return
        position = draw_position(lengths[slot], mask)
        wishes = read_wishes(slot, mask, lengths, slot_ints, slot_floats, bias_ids, stop_ids)
        wait_for_previous_kernel()
        if not live:
            if thread == 0:
                target_tokens[row], finite[row] = -1, 0
            return
        if drawing:
            stage(base, logits + row * (4 * width), first, uint32(MINUS_INFINITY))
        key, low = _whole_best(largest + row * (8 * chunks), chunks, pairs)
        broken = key == uint32(BROKEN)
        settled = broken or not drawing or key == uint32(MINUS_INFINITY_KEY)  # or every token is banned
        if chunk == 0 and thread == 0:
            finite[row] = 0 if broken else 1
            if settled:
                target_tokens[row] = 0 if broken else int32(index_of_low(low))
        copies_wait_all()
        if settled:
            return
        if touches(wishes, first):
            tokens = row_tokens + index * (4 * rows)
            apply_history(
                staged, first, slot, wishes, tokens, mask, prompt_seen, output_counts, bias_ids, bias_values, stop_ids
            )
        _scale(staged, value_of_key(key), temperature)
        counter = counters + row * (4 * COUNTERS)
        bound, tables = uint32(FINITE), int64(0)
        top_k, top_p = slot_ints[slot, TOP_K], slot_floats[slot, TOP_P]
        cuda.syncthreads()
        for by_mass in (False, True):
            if (by_mass and top_p < 1.0) or (not by_mass and 0 < top_k < width):
                found = find_bound(staged, bound, by_mass, top_k, top_p, masses, row, tables, counter + 4, tally, sums)
                bound = min(bound, found)
                tables += PASSES
        key, low = _own_draw(base, first, bound, slot_floats[slot, MIN_P], slot_ints[slot, SEED], position)
        last, key, low = row_best(key, low, pairs, drawn + row * (8 * chunks), counter, chunk, chunks)
        if last:
            clear_masses(masses, row, tables)
            if thread == 0:
                store_global_u32(counter + 4, uint32(0))
                target_tokens[row] = int32(index_of_low(low))

    signature = (
        *(types.int64, BYTES, types.int64, LONGS, INTS, *STATE, types.int64),
        *(INTS, BYTES, types.int64, types.int64, LONGS_3D),
    )
    return Kernel(f"sample_draw_{width}_{rows}", draw_kernel, signature, THREADS, min_blocks=2)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: with and without wide loads."""
    return [make(width, rows) for make in (_make_choose, _make_draw) for width, rows in ((128256, 4), (97, 2))]
