"""The assembler's two known errors: what it makes of such code, and that nobody gets to run it."""

import struct
from typing import Any

import pytest

from lowlat.errors import DeviceError
from lowlat.kernels.toolchain import compiler, link_checks, ptx
from lowlat.kernels.toolchain.compiler import compile_kernel
from lowlat.kernels.toolchain.kernel import Kernel
from lowlat.kernels.toolchain.link_checks import check_linked, count_opcodes, counted_twice
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types, uint32

# add 1 to R54; R6 = R54 * 4 + R17; read at R6 + 0x18704, or at R6 + 0x18700
COUNT, SCALE = (0x0000000136367836, 0x000FE20000000000), (0x0000001136062211, 0x002FCC00078E10FF)
READ_AGAIN, READ = (0x0187040006062984, 0x000E640000000800), (0x0187000006062984, 0x000E640000000800)


def test_counting_twice_is_seen() -> None:
    assert counted_twice([COUNT, SCALE, READ_AGAIN]) == [2]
    assert not counted_twice([COUNT, SCALE, READ]) and not counted_twice([SCALE, READ_AGAIN])


def make_copying(*, varying: bool) -> Kernel:
    """A kernel whose lanes all copy the same 64 bytes; varying: the assembler does not know that they do."""
    wait, same = ptx.copies_wait(0), not varying

    def copying(source: Any, out: Any) -> None:
        words = cuda.shared.array(1024, uint32)
        base = ptx.shared_address(words)
        if not same:
            base = ptx.varying(base)
        for piece in range(4):
            address = source + int64(cuda.blockIdx.x) * int64(1024) + piece * 16
            ptx.copy_async_16_once(uint32(base + uint32(piece * 16)), address)
        ptx.copies_commit()
        wait()
        cuda.syncthreads()
        ptx.store_global_u32(out + int64(cuda.threadIdx.x) * int64(4), words[cuda.threadIdx.x])

    return Kernel(f"copying_{varying}", copying, (types.int64, types.int64), 32)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_copy_that_no_gpu_executes_is_refused_when_it_is_linked(capability: tuple[int, int]) -> None:
    """The assembler still makes it: once it does not, this test says so, and `varying` may go."""
    with pytest.raises(DeviceError, match=r"kernel copying_False: the assembler made a copy that no GPU executes"):
        compile_kernel(make_copying(varying=False), capability)
    assert count_opcodes(compile_kernel(make_copying(varying=True), capability).code)[0xFAE] == 4


def elf(*instructions: tuple[int, int]) -> bytes:
    """A cubin of one section that holds these instructions."""
    code = b"".join(struct.pack("<QQ", *each) for each in instructions)
    head = bytearray(64)
    struct.pack_into("<Q", head, link_checks.SECTIONS_AT, 64 + len(code))
    struct.pack_into("<HH", head, link_checks.SECTION_SIZE, 64, 1)
    section = struct.pack("<IIQQQQ", 0, link_checks.PROGRAM_BITS, link_checks.EXECUTABLE, 0, 64, len(code))
    return bytes(head) + code + section.ljust(64, b"\0")


def test_a_number_counted_twice_is_refused_by_the_kernel_s_name() -> None:
    check_linked("sound", "", elf(COUNT, SCALE, READ))
    with pytest.raises(DeviceError, match=r"kernel broken: the assembler counts a number twice .* at instruction 2"):
        check_linked("broken", "", elf(COUNT, SCALE, READ_AGAIN))


def test_every_kernel_is_checked_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is compiled, and not again when the cache has it."""
    checked = []
    monkeypatch.setattr(compiler, "check_linked", lambda name, *_: checked.append(name))
    for _ in range(2):
        compile_kernel(make_copying(varying=True), (9, 0), tmp_path)
    assert checked == ["copying_True"]
