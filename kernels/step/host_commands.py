"""This module applies the host's commands in the kernel of a step's start, if there are any, each to its slot.

Commands and the first state of joining slots are in pinned host memory.
"""

from typing import Any

from lowlat.kernels.common.memory import int_at, long_at, set_byte, set_int, set_long
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, FORCED, HAS_GRAMMAR, LENGTH, NUM_FLOATS, NUM_INTS
from lowlat.kernels.reference.step.slots import CANCEL, COMMAND_WIDTH, JOIN, REWIND, SET_DRAFT_LIMIT
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64

__all__ = ["WAITING_WORDS", "apply_waiting", "commands_wait"]

OPCODE, SLOT, VALUE, COMMAND = 0, 1, 2, 3  # of a command
WAITING = 64  # commands fetched at a time
WAITING_WORDS = WAITING * COMMAND


@device_function
def commands_wait(thread: Any, head: Any, tail: Any, words: Any) -> Any:
    """Tell all threads what the first knows: head and tail, as the first two words; whether they differ."""
    if thread == 0:
        if head != tail:
            ptx.fence_system()
        words[0] = head
        words[1] = tail
    cuda.syncthreads()
    return words[0] != words[1]


@device_function
def _copy_row(thread: Any, threads: Any, slot: Any, num_words: Any, source: Any, target: Any) -> None:
    """Copy a slot's row of 32-bit words."""
    place = thread
    while place < num_words:
        set_int(target, slot * num_words + place, int_at(source, slot * num_words + place))
        place += threads


@device_function
def _keep_token(slot: Any, place: Any, end: Any, token: Any, context: Any, vocabulary: Any, arrays: Any) -> None:
    tokens, prompt_seen = arrays
    if place < end:
        set_int(tokens, slot * context + place, token)
        if token >= 0 and token < vocabulary:
            set_byte(prompt_seen, slot * vocabulary + token, 1)


@device_function
def _join_tokens(thread: Any, threads: Any, slot: Any, end: Any, sizes: Any, staged: Any, arrays: Any) -> None:
    """Copy and mark the tokens of the prompt: four loads at a time, because each takes a trip over the bus."""
    context, vocabulary = sizes
    first, place = slot * context, thread
    while place < end:
        second, third, fourth = place + threads, place + threads * 2, place + threads * 3
        a, b = int_at(staged, first + place), int_at(staged, first + min(second, end - 1))
        c, d = int_at(staged, first + min(third, end - 1)), int_at(staged, first + min(fourth, end - 1))
        _keep_token(slot, place, end, a, context, vocabulary, arrays)
        _keep_token(slot, second, end, b, context, vocabulary, arrays)
        _keep_token(slot, third, end, c, context, vocabulary, arrays)
        _keep_token(slot, fourth, end, d, context, vocabulary, arrays)
        place += threads * 4


@device_function
def _join(thread: Any, threads: Any, slot: Any, extents: Any, staged: Any, joined: Any, counts: Any) -> None:
    """Copy what is staged for a slot and forget its last request, by all threads."""
    context, vocabulary, table, stops, biases = extents
    _copy_row(thread, threads, slot, 2 * NUM_INTS, staged[0], joined[0])
    _copy_row(thread, threads, slot, NUM_FLOATS, staged[1], joined[1])
    _copy_row(thread, threads, slot, table, staged[3], joined[3])
    _copy_row(thread, threads, slot, stops, staged[4], joined[4])
    _copy_row(thread, threads, slot, biases, staged[5], joined[5])
    _copy_row(thread, threads, slot, biases, staged[6], joined[6])
    prompt_seen, output_counts = counts
    token = thread
    while token < vocabulary:
        set_byte(prompt_seen, slot * vocabulary + token, 0)
        set_int(output_counts, slot * vocabulary + token, 0)
        token += threads
    cuda.syncthreads()
    end = min(long_at(joined[0], slot * NUM_INTS + LENGTH), int64(context))
    _join_tokens(thread, threads, slot, end, (context, vocabulary), staged[2], (joined[2], prompt_seen))


@device_function
def _set_slot(opcode: Any, slot: Any, value: Any, state: Any) -> None:
    """A command's changes next to the rows that a join copies; by one thread."""
    lengths, active, num_drafts, slot_ints = state
    if opcode == SET_DRAFT_LIMIT:
        set_long(slot_ints, slot * NUM_INTS + DRAFT_LIMIT, value)
    elif opcode in (JOIN, CANCEL):
        set_int(active, slot, 1 if opcode == JOIN else 0)
        set_int(num_drafts, slot, 0)
        if opcode == JOIN:
            set_int(lengths, slot, long_at(slot_ints, slot * NUM_INTS + LENGTH))


@device_function
def _rewind(slot: Any, length: Any, extents: Any, tokens: Any, counts: Any, state: Any) -> None:
    """Take a slot's last tokens back, to be verified as the host forces them; by one thread."""
    context, vocabulary = extents[0], extents[1]
    lengths, active, num_drafts, slot_ints = state
    for place in range(length, int_at(lengths, slot)):
        token = int_at(tokens, slot * context + place)
        if token >= 0 and token < vocabulary:
            set_int(counts, slot * vocabulary + token, int_at(counts, slot * vocabulary + token) - 1)
    set_int(lengths, slot, length)
    set_int(active, slot, 1)
    set_int(num_drafts, slot, 0)
    set_long(slot_ints, slot * NUM_INTS + HAS_GRAMMAR, FORCED)


@device_function
def apply_waiting(
    thread: Any, threads: Any, ring: Any, extents: Any, words: Any, commands: Any, rows: Any, state: Any, counts: Any
) -> None:
    """All commands, in order; head and tail are the first two words at first."""
    staged, joined = rows
    source, taken = commands
    head, tail = words[0], words[1]
    while head < tail:
        cuda.syncthreads()
        if thread < WAITING and head + thread < tail:
            entry = (head + thread) % ring * COMMAND_WIDTH
            opcode, slot, value = long_at(source, entry), long_at(source, entry + 1), long_at(source, entry + 2)
            words[thread * COMMAND + OPCODE] = opcode
            words[thread * COMMAND + SLOT] = slot
            words[thread * COMMAND + VALUE] = value
        cuda.syncthreads()
        count = min(tail - head, int64(WAITING))
        for number in range(count):
            opcode, slot = words[number * COMMAND + OPCODE], words[number * COMMAND + SLOT]
            if opcode == JOIN:
                _join(thread, threads, slot, extents, staged, joined, counts)
            if thread == 0 and opcode == REWIND:
                _rewind(slot, words[number * COMMAND + VALUE], extents, joined[2], counts[1], state)
            elif thread == 0:
                _set_slot(opcode, slot, words[number * COMMAND + VALUE], state)
            cuda.syncthreads()
        head += count
    if thread == 0:
        set_long(taken, 0, tail)
