"""This module draws the target's token at every live node, and flags finite logits, in one launch with a block a chunk.

A row's largest logit comes from the best pairs that the GEMM of the logits left (or that `row_pairs` makes). For a
greedy row its first block stores the token, and the others exit at once. If a slot has penalties, biases, bans or a
grammar (for whose masks it waits), each block processes its chunk, and the row's largest is the largest of theirs. For
a sampled row, its blocks find the bounds of top_k and top_p if they are set, add noise, and find the largest. Order and
roundings are those of `kernels.reference.sampling.sample`. A draw depends only on its own row, its slot's state and its
position. State that the step's first kernel has set (slots and their parameters) is read before the previous kernel has
ended.
"""

import functools
import math
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.philox import philox, uniform
from lowlat.kernels.reference.sampling import sample as reference
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.slot_record import (
    HAS_GRAMMAR,
    MASKED,
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from lowlat.kernels.sampling.cutoff import (
    BINS,
    PASSES,
    TALLY_WORDS,
    clear_masses,
    make_find_bound,
    probabilities,
    wait_for_row,
)
from lowlat.kernels.sampling.grammar_mask import apply_mask, await_masks
from lowlat.kernels.sampling.logit_history import draw_position, make_apply_history, read_wishes, touches, touches_any
from lowlat.kernels.sampling.row_pairs import row_pairs
from lowlat.kernels.sampling.select import (
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
    is_last,
    load_words,
    make_stage,
    row_best,
    value_of_key,
    words_best,
    words_broken,
)
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32
from lowlat.kernels.toolchain.ptx import (
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

__all__ = ["examples", "sample"]

MAX_ROWS = 64  # of a slot
PAIRS = 2 * WARPS
SUMS = WARPS + 2
MAGNITUDE = 0x7FFFFFFF
TABLES = 2 * PASSES  # top_k's and top_p's
# arrivals of a row's blocks, their barrier for the bounds, that for the largest before, and whether masks are there
COUNTERS = 4
BYTES = types.Array(types.uint8, 1, "C")
INTS = types.Array(types.int32, 1, "C")
INTS_2D = types.Array(types.int32, 2, "C")
LONGS = types.Array(types.int64, 1, "C")
LONGS_2D = types.Array(types.int64, 2, "C")
LONGS_3D = types.Array(types.int64, 3, "C")
FLOATS_2D = types.Array(types.float32, 2, "C")
STATE_NAMES = (
    *("lengths", "slot_ints", "slot_floats", "prompt_seen", "output_counts", "bias_ids", "bias_values", "stop_ids"),
    *("grammar_masks", "grammar_ready"),
)
STATE = (INTS, LONGS_2D, FLOATS_2D, types.int64, types.int64, INTS_2D, FLOATS_2D, INTS_2D, types.int64, types.int64)
ROW = (types.int64, BYTES, types.int64, LONGS, INTS, *STATE, types.int64)  # logits to best
CHOSEN = (INTS, BYTES, types.int64, types.int64, types.int64, LONGS_3D)  # target_tokens to masses


@launches_with(reference.sample)
def sample(
    given: Given, *, workspace: Workspace, best: torch.Tensor | None = None, finite: torch.Tensor | None = None
) -> list[KernelCall]:
    """Draw the target's token at every live node, and on request flag the rows whose logits are finite.

    It takes the arguments of the reference's `sample`, and
    best    [B * T, n, 2]  int32  best pairs of the logits' GEMM, with the limit FINITE (`decode_gemm.PartialArgmax`);
                                  None: one more launch makes them
    finite  [B, T]         uint8  out: 1 for a live row without NaN or infinity; None: the flags are not stored
    target_tokens is -1 for a dead row, a pad slot, or if a grammar allows nothing, and 0 if logits are not finite.
    grammar_masks and grammar_ready may lie in pinned host memory.
    Time: plain greedy rows are not read, others once. Raises ShapeError for arguments that do not fit, V above 327680,
    and T above 64 or above the rows of the masks.
    """
    batch, rows, width, max_rows, mask_words = given.sizes("B", "T", "V", "max_T", "W")
    if rows > min(MAX_ROWS, max_rows) or mask_words != -(-width // 32):
        raise ShapeError(
            f"sample takes at most {MAX_ROWS} rows a slot, and masks of as many rows of {-(-width // 32)} words, got "
            f"{rows} rows and masks of {max_rows} rows of {mask_words} words"
        )
    count, chunks = batch * rows, count_chunks("logits", width)
    calls: list[KernelCall] = []
    if best is None:
        best, calls = row_pairs(given["logits"], FINITE, workspace)
    if finite is None:
        finite = workspace(f"sample.finite.{count}", (batch, rows), torch.uint8)
    check_shape("finite", finite, batch, rows)
    check_shape("best", best, count, best.shape[1], 2)
    largest = workspace(f"sample.largest.{count}.{chunks}", (count, chunks, 2), torch.int32)
    drawn = workspace(f"sample.drawn.{count}.{chunks}", (count, chunks, 2), torch.int32)
    counters = workspace(f"sample.counters.{count}", (count, COUNTERS), torch.int32)
    masses = workspace(f"sample.masses.{count}", (count, TABLES, BINS), torch.int64)
    flat = {name: given[name].reshape(-1) for name in ("row_live", "row_masks", "target_tokens")}
    row = (given["logits"], flat["row_live"], given["row_tokens"], flat["row_masks"], given["slots"])
    chosen = (flat["target_tokens"], finite.reshape(-1), largest, drawn, counters, masses)
    arguments = (*row, *given.take(*STATE_NAMES), best, *chosen)
    return [*calls, KernelCall(_make(width, rows, best.shape[1], max_rows), (chunks, count, 1), arguments)]


@device_function
def _whole_best(partials: Any, count: Any, pairs: Any) -> Any:
    """Return the best of a row's pairs, in every thread of the block.

    partials  address of the row's [count, 2] uint32; pairs: as in `block_best`
    """
    thread = cuda.threadIdx.x
    if thread < 32:
        key, low = best_partial(partials, count)
        if thread == 0:
            pairs[0], pairs[1] = key, low
    cuda.syncthreads()
    return pairs[0], pairs[1]


@device_function
def _scale(chunk: Any, largest: Any, temperature: Any) -> None:
    """Replace a chunk's logits, which all threads see, by (logit - largest) / temperature, each operation rounded."""
    for part in range(CHUNK // THREADS):
        place = part * THREADS + cuda.threadIdx.x
        below = add_rn(float_of_bits(chunk[place]), -largest)
        chunk[place] = bits_of_float(div_rn(below, temperature))


@device_function
def _noisier(key: Any, low: Any, bits: Any, index: Any, word: Any, bound: Any, min_p: Any) -> Any:
    """Return the better of a pair and a token with its noise, if the token may be drawn, else the pair."""
    if uint32(bits & uint32(MAGNITUDE)) > bound or (min_p > float32(0.0) and probabilities(bits) < min_p):
        return key, low
    noise = -float32(math.log(-float32(math.log1p(-uniform(word)))))
    return better(key, low, bits_of_float(add_rn(float_of_bits(bits), noise)), index)


@device_function
def _own_draw(staged: Any, first: Any, bound: Any, min_p: Any, seed: Any, position: Any) -> Any:
    """Return the best pair of logit plus noise among a thread's own tokens."""
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
def _make_find_bounds(width: int) -> Any:
    """A device function that finds a row's bound of top_k and top_p, and the number of tables of masses it used."""
    find_bound = make_find_bound(count_chunks("logits", width))

    @device_function
    def find_bounds(
        staged: Any, top_k: Any, top_p: Any, masses: Any, row: Any, barrier: Any, tally: Any, sums: Any
    ) -> Any:
        bound, tables = uint32(FINITE), int64(0)
        for by_mass in (False, True):
            if (by_mass and top_p < 1.0) or (not by_mass and 0 < top_k < width):
                found = find_bound(staged, bound, by_mass, top_k, top_p, masses, row, tables, barrier, tally, sums)
                bound = min(bound, found)
                tables += PASSES
        return bound, tables

    return find_bounds


@device_function
def _agreed_best(key: Any, low: Any, pairs: Any, largest: Any, counter: Any, chunk: Any, chunks: Any) -> Any:
    """Return the best pair of a row from each thread's, in all blocks of the row, which wait for each other.

    largest  address of the row's [chunks, 2] uint32; counter: of its barrier, zero before; pairs: as in `block_best`
    """
    key, low = block_best(key, low, pairs)
    if cuda.threadIdx.x == 0:
        store_global_64(largest + 8 * chunk, key, low)
    wait_for_row(counter, chunks)
    return _whole_best(largest, chunks, pairs)


@functools.cache
def _make_processed_best(width: int, rows: int) -> Any:
    """A device function that applies a slot's penalties, biases, bans and mask, and then finds a row's best pair."""
    chunks, apply_history = count_chunks("logits", width), make_apply_history(width, rows)
    aligned = -(-width // 32) % 4 == 0  # each row's mask

    @device_function
    def processed_best(
        staged: Any,
        first: Any,
        touched: Any,
        masked: Any,
        drawing: Any,
        slot: Any,
        wishes: Any,
        tokens: Any,
        mask: Any,
        state: Any,
        guide: Any,
        pairs: Any,
        largest: Any,
        counter: Any,
        chunk: Any,
    ) -> Any:
        """Return (whether this block finishes the row, key, low); for a sampled row all blocks get the pair.

        staged   [CHUNK] uint32  shared: the block's chunk, whose own words each thread sees; processed in place
        touched  whether penalties, biases or bans change this chunk
        masked   whether the slot has a grammar
        state    prompt_seen, output_counts, bias_ids, bias_values, stop_ids
        guide    addresses of the row's mask and of the slot's word, and the slot's length, see `await_masks`
        largest  address of the row's [chunks, 2] uint32
        counter  address of the row's counters
        The key is BROKEN if a number of the row was not finite before.
        """
        words = load_words(shared_address(staged))
        broken = words_broken(words, first, width, uint32(FINITE))
        if touched:
            seen, counts, bias_ids, bias_values, stop_ids = state
            cuda.syncthreads()  # all see what the others copied
            apply_history(staged, first, slot, wishes, tokens, mask, seen, counts, bias_ids, bias_values, stop_ids)
        if masked:
            mask_row, ready, length = guide
            await_masks(ready, length, counter + 12, chunk == 0)
            apply_mask(staged, first, width, mask_row, aligned)
        if touched or masked:
            words = load_words(shared_address(staged))
        key, low = words_best(words, first)
        if broken:
            key = uint32(BROKEN)
        if drawing:
            key, low = _agreed_best(key, low, pairs, largest, counter + 8, chunk, chunks)
            return chunk == 0, key, low
        return row_best(key, low, pairs, largest, counter, chunk, chunks)

    return processed_best


@functools.cache
def _make(width: int, rows: int, blocks: int, max_rows: int) -> Kernel:
    """Specialised by V, T, the best pairs of a row, and the masks of a slot."""
    chunks, mask_bytes = count_chunks("logits", width), 4 * (-(-width // 32))
    stage, processed_best, find_bounds = make_stage(width), _make_processed_best(width, rows), _make_find_bounds(width)

    def sample_kernel(
        logits: Any, row_live: Any, row_tokens: Any, row_masks: Any, slots: Any, lengths: Any, slot_ints: Any,
        slot_floats: Any, prompt_seen: Any, output_counts: Any, bias_ids: Any, bias_values: Any, stop_ids: Any,
        grammar_masks: Any, grammar_ready: Any, best: Any, target_tokens: Any, finite: Any, largest: Any, drawn: Any,
        counters: Any, masses: Any,
    ) -> None:  # fmt: skip
        let_next_kernel_start()
        staged = cuda.shared.array(CHUNK, types.uint32, alignment=16)
        tally, sums = cuda.shared.array(TALLY_WORDS, types.uint32), cuda.shared.array(SUMS, types.int64)
        pairs, flag = cuda.shared.array(PAIRS, types.uint32), cuda.shared.array(1, types.uint32)
        base = shared_address(staged)
        chunk, row, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), cuda.threadIdx.x
        first, index, mask = chunk * CHUNK, row // rows, row_masks[row]
        live = (slots[index] >= 0) & (row_live[row] != 0)
        slot = max(int64(slots[index]), 0)
        temperature = slot_floats[slot, TEMPERATURE]
        drawing = live & (temperature != 0.0)
        position = draw_position(lengths[slot], mask)
        wishes = read_wishes(slot, mask, lengths, slot_ints, slot_floats, bias_ids, stop_ids)
        masked = live & (slot_ints[slot, HAS_GRAMMAR] == MASKED)
        changed = live & (touches_any(wishes, width, flag) | masked)
        if not drawing and not changed and chunk != 0:
            return
        touched = changed and touches(wishes, first, flag)
        wait_for_previous_kernel()
        if not live:
            if thread == 0:
                target_tokens[row], finite[row] = -1, 0
            return
        if drawing or changed:
            stage(base, logits + row * (4 * width), first, uint32(MINUS_INFINITY))
        counter, settles = counters + row * (4 * COUNTERS), chunk == 0
        if changed:
            copies_wait_all()
            state = prompt_seen, output_counts, bias_ids, bias_values, stop_ids
            tokens, at = row_tokens + index * (4 * rows), largest + row * (8 * chunks)
            node = slot * max_rows + (row - index * rows)
            guide = grammar_masks + node * mask_bytes, grammar_ready + 8 * slot, int64(lengths[slot])
            settles, key, low = processed_best(
                staged, first, touched, masked, drawing, slot, wishes, tokens, mask, state, guide, pairs, at, counter,
                chunk,
            )  # fmt: skip
        else:
            key, low = _whole_best(best + row * (8 * blocks), blocks, pairs)
        broken = key == uint32(BROKEN)
        settled = broken or not drawing or key == uint32(MINUS_INFINITY_KEY)  # or every token is banned
        if settles and thread == 0:
            finite[row] = 0 if broken else 1
            if masked and not drawing:
                store_global_u32(counter + 12, uint32(0))
            if settled:
                nothing = masked and key == uint32(MINUS_INFINITY_KEY)
                target_tokens[row] = 0 if broken else int32(-1) if nothing else int32(index_of_low(low))
        copies_wait_all()
        if settled:
            if drawing and changed and thread < 32 and is_last(counter, chunks) and thread == 0:
                store_global_u32(counter + 8, uint32(0))
                store_global_u32(counter + 12, uint32(0))
            return
        cuda.syncthreads()  # all see what the others copied
        _scale(staged, value_of_key(key), temperature)
        top_k, top_p = slot_ints[slot, TOP_K], slot_floats[slot, TOP_P]
        cuda.syncthreads()
        bound, tables = find_bounds(staged, top_k, top_p, masses, row, counter + 4, tally, sums)
        key, low = _own_draw(base, first, bound, slot_floats[slot, MIN_P], slot_ints[slot, SEED], position)
        last, key, low = row_best(key, low, pairs, drawn + row * (8 * chunks), counter, chunk, chunks)
        if last:
            clear_masses(masses, row, tables)
            if thread == 0:
                store_global_u32(counter + 4, uint32(0))
                store_global_u32(counter + 8, uint32(0))
                store_global_u32(counter + 12, uint32(0))
                target_tokens[row] = int32(index_of_low(low))

    return Kernel(f"sample_{width}_{rows}_{blocks}_{max_rows}", sample_kernel, (*ROW, *CHOSEN), THREADS, min_blocks=2)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: with and without wide loads."""
    return [_make(128256, 4, 132, 8), _make(97, 2, 3, 2)]
