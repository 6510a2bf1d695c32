"""What machine code says of a cubin, without a disassembler: instructions are 128 bits, the opcode in the lowest 12."""

import struct
from collections import Counter
from collections.abc import Iterator

__all__ = ["count_opcodes", "instructions"]

PROGRAM_BITS, EXECUTABLE = 1, 0x4
SECTIONS_AT, SECTION_SIZE, NUM_SECTIONS = 0x28, 0x3A, 0x3C
INSTRUCTION_BYTES = 16
OPCODE = 0xFFF


def count_opcodes(cubin: bytes) -> Counter[int]:
    """How often each opcode stands in the executable sections of an ELF file of 64 bits."""
    return Counter(low & OPCODE for low in instructions(cubin))


def instructions(cubin: bytes) -> Iterator[int]:
    """The lower halves of all instructions, 64 bits each: the opcode, and from bit 16 on registers of 8 bits."""
    for code in _executable_sections(cubin):
        for (low,) in struct.iter_unpack(f"<Q{INSTRUCTION_BYTES - 8}x", code):
            yield low


def _executable_sections(cubin: bytes) -> Iterator[bytes]:
    (start,) = struct.unpack_from("<Q", cubin, SECTIONS_AT)
    size, count = struct.unpack_from("<HH", cubin, SECTION_SIZE)
    for number in range(count):
        kind, flags, _, offset, length = struct.unpack_from("<IQQQQ", cubin, start + number * size + 4)
        if kind == PROGRAM_BITS and flags & EXECUTABLE:
            yield cubin[offset : offset + length // INSTRUCTION_BYTES * INSTRUCTION_BYTES]
