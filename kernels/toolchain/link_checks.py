"""This module checks linked machine code for two known errors of NVIDIA's assembler (nvJitLink 13.0).

1. A copy from global to shared memory with a hint for the L2, from an address that is the same in all lanes, becomes an
   instruction that no GPU executes.
2. If a number is increased by a constant and then scaled to an address, the constant is added twice.
`ptx.varying` avoids both errors, but only the machine code shows if a kernel forgot it. No disassembler is needed:
instructions are 128 bits, with the opcode in the lowest 12. A check takes 0.2 ms, that of the longest kernel 1.4.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator

from lowlat.errors import DeviceError

__all__ = ["check_linked", "count_opcodes", "counted_twice", "instructions", "whole_instructions"]

PROGRAM_BITS, EXECUTABLE = 1, 0x4
SECTIONS_AT, SECTION_SIZE, NUM_SECTIONS = 0x28, 0x3A, 0x3C
INSTRUCTION_BYTES = 16
OPCODE = 0xFFF
# of 9.0: add a constant to a register; scale a register and add another; read shared or global memory
ADD, SCALED, READS = {0x836, 0x810}, {0x211, 0x824}, {0x984, 0x381, 0x981}
ENDS = {0x947, 0x94D, 0x941, 0x943, 0x944, 0x950}  # branches, calls, returns, and where branches meet
NEAR = 16  # instructions
HINTED_COPY, UNIFORM_COPY = "cp.async.cg.shared.global.L2::cache_hint", 0xDAE


def check_linked(name: str, ptx: str, cubin: bytes) -> None:
    """Raise DeviceError, which names the kernel, if the assembler has made one of its known errors."""
    way_out = "use executor 'reference', or another release of nvidia-nvjitlink"
    if HINTED_COPY in ptx and count_opcodes(cubin)[UNIFORM_COPY]:
        raise DeviceError(
            f"kernel {name}: the assembler made a copy that no GPU executes, of an address that is the same in all "
            f"lanes; {way_out}"
        )
    places = counted_twice(whole_instructions(cubin))
    if places:
        raise DeviceError(
            f"kernel {name}: the assembler counts a number twice that addresses are made of, at instruction "
            f"{places[0]}; {way_out}"
        )


def count_opcodes(cubin: bytes) -> Counter[int]:
    """Count each opcode in the executable sections of a 64-bit ELF file."""
    return Counter(low & OPCODE for low in instructions(cubin))


def instructions(cubin: bytes) -> Iterator[int]:
    """Yield the lower 64 bits of each instruction: the opcode, and from bit 16 on registers of 8 bits."""
    return (low for low, _ in whole_instructions(cubin))


def whole_instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Yield both halves of each instruction; the upper one has modifiers and the scheduling information."""
    for code in _executable_sections(cubin):
        yield from struct.iter_unpack("<QQ", code)


def counted_twice(code: Iterable[tuple[int, int]]) -> list[int]:
    """Return the indices of the reads whose address has a constant in it twice (error 2), among all instructions.

    The pattern: c is added to a number, the sum is scaled by s to an address, and the read is at offset c * s from it.
    Bases of tables are multiples of 16 bytes. So an offset counts that is c * s modulo 16, with c * s below 16.
    Only straight runs of instructions of 9.0 are searched.
    """
    known, found = list(code), []
    for start, (low, _) in enumerate(known):
        number, count = low >> 16 & 0xFF, low >> 32
        if low & OPCODE not in ADD or low >> 24 & 0xFF != number or not 0 < count < 16:
            continue
        scales: dict[int, int] = {}
        for place, (later, high) in enumerate(known[start + 1 : start + NEAR], start + 1):
            opcode, target, first = later & OPCODE, later >> 16 & 0xFF, later >> 24 & 0xFF
            if opcode in ENDS:
                break
            if opcode in READS and first in scales and (later >> 40) % 16 == count * scales[first] < 16:
                found.append(place)
            scales.pop(target, None)
            if opcode in SCALED and first == number:
                scales[target] = 1 << (high >> 11 & 31) if opcode == 0x211 else later >> 32
            if target == number and opcode not in READS:
                break
    return found


def _executable_sections(cubin: bytes) -> Iterator[bytes]:
    (start,) = struct.unpack_from("<Q", cubin, SECTIONS_AT)
    size, count = struct.unpack_from("<HH", cubin, SECTION_SIZE)
    for number in range(count):
        kind, flags, _, offset, length = struct.unpack_from("<IQQQQ", cubin, start + number * size + 4)
        if kind == PROGRAM_BITS and flags & EXECUTABLE:
            yield cubin[offset : offset + length // INSTRUCTION_BYTES * INSTRUCTION_BYTES]
