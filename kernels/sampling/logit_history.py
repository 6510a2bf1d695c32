"""This module applies penalties, biases and banned stops to a chunk of logits in shared memory, for `sample`.

The order and the roundings are those of `kernels.reference.sampling.sample`.
"""

import functools
from typing import Any

from lowlat.kernels.reference.step.slot_record import (
    FREQUENCY,
    MAX_BIASES,
    MAX_STOPS,
    MIN_TOKENS,
    PRESENCE,
    PROMPT_LENGTH,
    REPETITION,
)
from lowlat.kernels.sampling.select import CHUNK, MINUS_INFINITY, STRIDE, THREADS, copies_wait_all, make_stage
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32
from lowlat.kernels.toolchain.ptx import (
    add_rn,
    bits_of_float,
    div_rn,
    float_of_bits,
    load_global_i32,
    load_global_u8,
    mul_rn,
    shared_address,
)

__all__ = ["draw_position", "make_apply_history", "read_wishes", "touches", "touches_any"]

LARGEST = 3.4028234663852886e38  # the largest float32


@device_function
def draw_position(length: Any, mask: Any) -> Any:
    """The absolute position of the draw after a node: committed tokens, and the node's drafted ancestors and self."""
    return int64(length) + int64(cuda.popc(mask)) - 1


@device_function
def _inside(place: Any) -> Any:
    """Whether a place lies in a chunk."""
    return (place >= 0) & (place < CHUNK)


@device_function
def _clamped(value: Any) -> Any:
    return min(max(value, float32(-LARGEST)), float32(LARGEST))


@device_function
def _penalised(value: Any, seen: Any, count: Any, parameters: Any) -> Any:
    """One logit after repetition, presence and frequency penalty, each operation rounded by itself."""
    repetition, presence, frequency = parameters
    present = float32(1.0) if count > 0 else float32(0.0)
    if count > 0 or seen != 0:
        value = _clamped(div_rn(value, repetition) if value > float32(0.0) else mul_rn(value, repetition))
    value = add_rn(value, -mul_rn(presence, present))
    return add_rn(value, -mul_rn(frequency, float32(count)))


@functools.cache
def _make_add_penalties(width: int, rows: int) -> Any:
    """A device function that applies the three penalties to a chunk; specialised by V and T."""
    stage = make_stage(width)
    wide = width % 4 == 0

    @device_function
    def four_flags(seen: Any, index: Any) -> Any:
        """Four flags of the prompt from `index` on as the bytes of a word; past the row's end they mean nothing."""
        if wide:
            return uint32(load_global_i32(seen + min(index, int64(width - 4))))
        flags = uint32(0)
        for part in range(4):
            flag = load_global_u8(seen + min(index + part, int64(width - 1)))
            flags = uint32(flags | uint32(flag << uint32(8 * part)))
        return flags

    @device_function
    def penalise_four(chunk: Any, times: Any, place: Any, flags: Any, parameters: Any) -> None:
        """Four numbers from `place` on."""
        for part in range(4):
            value = float_of_bits(chunk[place + part])
            seen = uint32(flags >> uint32(8 * part)) & uint32(255)
            chunk[place + part] = bits_of_float(_penalised(value, seen, times[place + part], parameters))

    @device_function
    def add_penalties(chunk: Any, first: Any, tokens: Any, mask: Any, seen: Any, counts: Any, parameters: Any) -> None:
        """seen, counts: addresses of the slot's rows; tokens: of the slot's nodes; parameters: the three penalties."""
        thread = cuda.threadIdx.x
        times = cuda.shared.array(CHUNK, types.int32, alignment=16)
        stage(shared_address(times), counts, first, uint32(0))
        place = 4 * int64(thread)
        flags0 = four_flags(seen, first + place)
        flags1 = four_flags(seen, first + place + STRIDE)
        flags2 = four_flags(seen, first + place + 2 * STRIDE)
        flags3 = four_flags(seen, first + place + 3 * STRIDE)
        copies_wait_all()
        cuda.syncthreads()
        if 0 < thread < rows and (mask >> thread) & 1 != 0:
            drafted = int64(load_global_i32(tokens + 4 * int64(thread))) - first
            if 0 <= drafted < CHUNK:
                cuda.atomic.add(times, drafted, 1)
        cuda.syncthreads()
        penalise_four(chunk, times, place, flags0, parameters)
        penalise_four(chunk, times, place + STRIDE, flags1, parameters)
        penalise_four(chunk, times, place + 2 * STRIDE, flags2, parameters)
        penalise_four(chunk, times, place + 3 * STRIDE, flags3, parameters)
        cuda.syncthreads()

    return add_penalties


@device_function
def read_wishes(
    slot: Any, mask: Any, lengths: Any, slot_ints: Any, slot_floats: Any, bias_ids: Any, stop_ids: Any
) -> Any:
    """The arguments of `apply_history` for a slot: penalties, the thread's bias and stop ids, whether stops are banned.

    No load waits for another, and none for the logits: a step's first kernel settles all of it.
    """
    thread = cuda.threadIdx.x
    near, far = bias_ids[slot, thread], bias_ids[slot, min(thread + THREADS, MAX_BIASES - 1)]
    stop = stop_ids[slot, thread & (MAX_STOPS - 1)]
    drawn = draw_position(lengths[slot], mask) - slot_ints[slot, PROMPT_LENGTH]
    banning = drawn < slot_ints[slot, MIN_TOKENS]
    penalties = slot_floats[slot, REPETITION], slot_floats[slot, PRESENCE], slot_floats[slot, FREQUENCY]
    return penalties, near, far, stop, banning


@device_function
def _is_plain(penalties: Any) -> Any:
    return (penalties[0] == 1.0) & (penalties[1] == 0.0) & (penalties[2] == 0.0)


@device_function
def _any_thread(mine: Any, flag: Any) -> Any:
    """Whether `mine` is true in any thread; all must come here.

    flag  [1] uint32, shared memory that nobody else uses. (A barrier that votes would do without it, but the code that
          is made of one here, between stores that depend on it, ends as an illegal instruction on an H200.)
    """
    if cuda.threadIdx.x == 0:
        flag[0] = uint32(0)
    cuda.syncthreads()
    if mine:
        cuda.atomic.max(flag, 0, uint32(1))
    cuda.syncthreads()
    found = flag[0] != uint32(0)
    cuda.syncthreads()  # before the next question
    return found


@device_function
def touches_any(wishes: Any, width: Any, flag: Any) -> Any:
    """Whether what `read_wishes` gave may change any number of a row of `width`; as `touches` is asked of a chunk."""
    penalties, near, far, stop, banning = wishes
    named = ((near >= 0) & (near < width)) | ((far >= 0) & (far < width)) | (banning & (stop >= 0) & (stop < width))
    return _any_thread(named or not _is_plain(penalties), flag)


@device_function
def touches(wishes: Any, first: Any, flag: Any) -> Any:
    """Whether what `read_wishes` gave changes any number of the chunk from `first` on; all threads must come here.

    flag  as `_any_thread` has it
    """
    penalties, near, far, stop, banning = wishes
    named = _inside(near - first) | _inside(far - first) | (banning & _inside(stop - first))
    return _any_thread(named or not _is_plain(penalties), flag)


@functools.cache
def make_apply_history(width: int, rows: int) -> Any:
    """A device function that applies a slot's penalties, biases and bans to a chunk; specialised by V and T.

    Its arguments: the chunk as a shared array of bits, complete for the thread that owns each; the first index; the
    slot and what `read_wishes` gave for it; the row's tokens and its mask; then the state as `sample` has it,
    prompt_seen and output_counts by address. Where `touches` says no, it would change nothing. All threads must come
    here; they see the whole chunk when they return.
    """
    add_penalties = _make_add_penalties(width, rows)

    @device_function
    def apply_history(
        chunk: Any,
        first: Any,
        slot: Any,
        wishes: Any,
        tokens: Any,
        mask: Any,
        prompt_seen: Any,
        output_counts: Any,
        bias_ids: Any,
        bias_values: Any,
        stop_ids: Any,
    ) -> None:
        thread = cuda.threadIdx.x
        penalties, _near, _far, _stop, banning = wishes
        cuda.syncthreads()
        if penalties[0] != 1.0 or penalties[1] != 0.0 or penalties[2] != 0.0:
            seen, counts = prompt_seen + slot * width, output_counts + slot * (4 * width)
            add_penalties(chunk, first, tokens, mask, seen, counts, penalties)
        for column in range(thread, MAX_BIASES, THREADS):
            place = bias_ids[slot, column] - first
            if 0 <= place < CHUNK and first + place < width:
                value = add_rn(float_of_bits(chunk[place]), bias_values[slot, column])
                chunk[place] = bits_of_float(value)
        cuda.syncthreads()
        for part in range(CHUNK // THREADS):
            place = part * THREADS + thread
            if first + place < width:
                chunk[place] = bits_of_float(_clamped(float_of_bits(chunk[place])))
        cuda.syncthreads()
        if banning and thread < MAX_STOPS:
            place = stop_ids[slot, thread] - first
            if 0 <= place < CHUNK and first + place < width:
                chunk[place] = uint32(MINUS_INFINITY)
        cuda.syncthreads()

    return apply_history
