"""This module compiles a Kernel to machine code for one compute capability, and keeps it on disk between runs.

It needs no GPU: NVVM makes PTX, nvJitLink makes the cubin and reports registers, stack and shared memory.
"""

import contextlib
import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lowlat.errors import DeviceError
from lowlat.kernels.toolchain.digests import UNKNOWN, assembler, kernel_digest
from lowlat.kernels.toolchain.kernel import Kernel
from lowlat.kernels.toolchain.link_checks import check_linked
from lowlat.kernels.toolchain.locks import locked
from lowlat.kernels.toolchain.numba_cuda import compile_lto, compile_ptx, fork_compiler, target_of

__all__ = ["CompiledKernel", "compile_ahead", "compile_kernel", "is_kept", "link"]

logger = logging.getLogger("lowlat")
_refused: set[Path] = set()  # directories that cannot be written, and for which a warning was given

WORTH_FORKING = 4  # kernels
PATIENCE_S = 300.0  # wait for another process that compiles the same: several times a kernel's time on a busy machine
ATTEMPTS = 2  # to link, if the log is empty: this happens once in thousands, when all cores of a machine are busy
# the linker's report on a kernel, and the assembler's on a whole program
LINKED = re.compile(r"used (?P<registers>\d+) registers.*?(?P<stack>\d+) stack(?:, (?P<shared>\d+) bytes smem)?")
WHOLE = re.compile(
    r"Compiling entry function '(?P<entry>[\w$]+)'.*?(?P<stack>\d+) bytes stack frame.*?"
    r"Used (?P<registers>\d+) registers(?:, used \d+ barriers)?(?:, (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code and the resources that it uses.

    entry        the name of the entry in `code`
    code         a cubin; or PTX, if the driver links it
    registers    a thread; 0 if the driver links it
    stack_bytes  a thread: spills and arrays in local memory
    shared_bytes static
    """

    entry: str
    code: bytes
    registers: int
    stack_bytes: int
    shared_bytes: int

    @property
    def is_cubin(self) -> bool:
        """Whether `code` is machine code, not PTX."""
        return self.code.startswith(b"\x7fELF")


def compile_kernel(kernel: Kernel, capability: tuple[int, int], cache_directory: Path | None = None) -> CompiledKernel:
    """Compile a kernel, or take from `cache_directory` the code that an earlier run compiled from the same sources.

    Code from another machine with the same compilers is taken too; an unknown version of NVVM equals any. If another
    process is compiling the kernel, this one waits for it, at most PATIENCE_S.

    Raises DeviceError when the linker refuses the PTX, with its log, and for machine code that is known to be wrong.
    """
    if cache_directory is None:
        return _compile(kernel, capability)
    path = _path(kernel, capability, cache_directory)
    made = _made_once(kernel, capability, path, PATIENCE_S)
    if made is None:  # the process that holds the lock hangs, or was stopped
        made = _compile(kernel, capability)
        _write(path, made)
    return made


def _made_once(kernel: Kernel, capability: tuple[int, int], path: Path, patience_s: float) -> CompiledKernel | None:
    """Read a kernel's code from its file, or compile it into it; None if another process still compiles it then."""
    known = _read(path)
    if known is not None:
        return known
    with locked(path, patience_s) as is_mine:
        known = _read(path)  # the process that held the lock before may have written it
        if known is None and is_mine:
            known = _compile(kernel, capability)
            _write(path, known)
    return known


def compile_ahead(
    kernels: Iterable[Kernel], capability: tuple[int, int], cache_directory: Path, workers: int | None = None
) -> int:
    """Compile the kernels that the cache lacks, in forked processes that touch no device. Returns their number.

    workers  None: one for each core

    Each process takes kernels that no process has begun, of this program or another. It skips kernels that others are
    compiling, and kernels that fail; `compile_kernel` then waits for them, or raises the error.
    """
    unique = {kernel.name: kernel for kernel in kernels}.values()
    missing = [kernel for kernel in unique if not _is_known(_path(kernel, capability, cache_directory))]
    random.Random(os.getpid()).shuffle(missing)  # so programs that start together begin with different kernels
    count = min(len(os.sched_getaffinity(0)) if workers is None else workers, len(missing))
    if len(missing) < WORTH_FORKING or count < 2:
        return len(missing)
    children = []
    for worker in range(count):
        child = fork_compiler()
        if child == 0:
            _refused.add(cache_directory)  # no warning here: the parent compiles what was not kept, and gives it
            try:
                first = len(missing) * worker // count
                for kernel in missing[first:] + missing[:first]:
                    with contextlib.suppress(Exception):
                        _made_once(kernel, capability, _path(kernel, capability, cache_directory), patience_s=0)
            finally:
                os._exit(0)  # without clean-up of the parent's threads, files and device
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return len(missing)


def is_kept(kernel: Kernel, capability: tuple[int, int], cache_directory: Path) -> bool:
    """Whether a later run finds this kernel's code in a directory."""
    return _is_known(_path(kernel, capability, cache_directory))


def _path(kernel: Kernel, capability: tuple[int, int], cache_directory: Path) -> Path:
    facts = (kernel_digest(kernel), target_of(capability, kernel.specific))
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    return cache_directory / f"{key}.cubin"


def _compile(kernel: Kernel, capability: tuple[int, int]) -> CompiledKernel:
    bounds = (kernel.threads, kernel.min_blocks)
    ptx, entry = compile_ptx(kernel.function, kernel.signature, capability, bounds, kernel.specific)
    if not kernel.linked:
        return CompiledKernel(entry, ptx.encode(), 0, 0, 0)
    lto = compile_lto(kernel.function, kernel.signature, capability, bounds) if kernel.whole else None
    return link(ptx, entry, capability, kernel.name, kernel.specific, lto)


def link(
    ptx: str, entry: str, capability: tuple[int, int], name: str, specific: bool = False, lto: bytes | None = None
) -> CompiledKernel:
    """Assemble PTX to a cubin. Raises DeviceError with the assembler's log, or if the assembler's code is wrong.

    specific  with the instructions that no later capability has
    lto       the same kernel from `compile_lto`; it is assembled in place of the PTX, as a whole program
    """
    pattern, log = WHOLE if lto else LINKED, ""
    for _ in range(ATTEMPTS):
        code, log = _assemble(ptx, name, target_of(capability, specific), lto)
        if found := pattern.search(log):
            break
    else:
        raise DeviceError(f"kernel {name}: the linker's log tells no registers: {log!r}")
    check_linked(name, ptx, code)
    used = found.groupdict()
    registers, stack, shared = (int(used[part] or 0) for part in ("registers", "stack", "shared"))
    return CompiledKernel(used.get("entry", entry), code, registers, stack, shared)


def _is_known(path: Path) -> bool:
    """Whether a file exists and its header names this NVVM. A damaged file is only noticed when it is read."""
    try:
        with path.open("rb") as file:
            return _is_of_this_assembler(json.loads(file.readline()).get("assembler"))
    except (OSError, ValueError, AttributeError):
        return False


def _is_of_this_assembler(other: str) -> bool:
    return assembler() in (UNKNOWN, other)


def _read(path: Path) -> CompiledKernel | None:
    """Return the content of a file; None if there is no file, or an incomplete one."""
    try:
        header, code = path.read_bytes().split(b"\n", 1)
        fields = json.loads(header)
        made_by, digest = fields.pop("assembler"), fields.pop("digest")
        if not _is_of_this_assembler(made_by) or digest != hashlib.sha256(code).hexdigest():
            return None
        return CompiledKernel(code=code, **fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(path: Path, compiled: CompiledKernel) -> None:
    """Write a file atomically: another process may be writing it, too. An unwritable cache gives one warning."""
    fields = asdict(compiled)
    code = fields.pop("code")
    fields["assembler"], fields["digest"] = assembler(), hashlib.sha256(code).hexdigest()
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(json.dumps(fields).encode() + b"\n" + code)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if path.parent not in _refused:
            _refused.add(path.parent)
            logger.warning(
                "compiled kernels cannot be kept in %s: %s; every start compiles them again (LOWLAT_KERNEL_CACHE)",
                path.parent, error.strerror,
            )  # fmt: skip


def _assemble(ptx: str, name: str, target: str, lto: bytes | None) -> tuple[bytes, str]:
    """Return a cubin and the linker's log. Raises DeviceError with the linker's error."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={target}", "-verbose", "-O3", *(["-lto"] if lto else [])]
    kinds, source = nvjitlink.InputType, lto or ptx.encode()
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, kinds.LTOIR if lto else kinds.PTX, source, len(source), name)
        nvjitlink.complete(handle)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    except nvjitlink.nvJitLinkError as error:
        problem = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, problem)
        raise DeviceError(f"kernel {name} does not link: {problem.decode(errors='replace')}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(code), log.decode(errors="replace")
