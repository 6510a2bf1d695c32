"""From a Kernel to machine code for one compute capability, with what it uses; kept on disk between runs.

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
_refused: set[Path] = set()  # directories of which it was said that they cannot be written

WORTH_FORKING = 4  # kernels
PATIENCE_S = 300.0  # with a process that compiles the same: several times what a kernel takes on a machine that is full
ATTEMPTS = 2  # of a link whose log is empty: one in thousands, on a machine whose cores are all taken
# what the linker says of a kernel, and the assembler of a whole program
LINKED = re.compile(r"used (?P<registers>\d+) registers.*?(?P<stack>\d+) stack(?:, (?P<shared>\d+) bytes smem)?")
WHOLE = re.compile(
    r"Compiling entry function '(?P<entry>[\w$]+)'.*?(?P<stack>\d+) bytes stack frame.*?"
    r"Used (?P<registers>\d+) registers(?:, used \d+ barriers)?(?:, (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code and what it uses.

    entry        the name of the entry in `code`
    code         a cubin; or PTX, where the driver links
    registers    a thread; 0 where the driver links
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
        """Whether `code` is machine code."""
        return self.code.startswith(b"\x7fELF")


def compile_kernel(kernel: Kernel, capability: tuple[int, int], cache_directory: Path | None = None) -> CompiledKernel:
    """Compile, or take from `cache_directory` what an earlier run compiled from the same sources.

    Code that another machine compiled with the same compilers is taken too; an unknown version of NVVM equals any. What
    another process is compiling is waited for, at most PATIENCE_S.

    Raises DeviceError when the linker refuses the PTX, with its log, and for machine code that is known to be wrong.
    """
    if cache_directory is None:
        return _compile(kernel, capability)
    path = _path(kernel, capability, cache_directory)
    made = _made_once(kernel, capability, path, PATIENCE_S)
    if made is None:  # whoever holds the lock hangs, or was stopped
        made = _compile(kernel, capability)
        _write(path, made)
    return made


def _made_once(kernel: Kernel, capability: tuple[int, int], path: Path, patience_s: float) -> CompiledKernel | None:
    """The code of a kernel, from its file or compiled for it; None where another process takes longer to compile it."""
    known = _read(path)
    if known is not None:
        return known
    with locked(path, patience_s) as is_mine:
        known = _read(path)  # what the process before wrote
        if known is None and is_mine:
            known = _compile(kernel, capability)
            _write(path, known)
    return known


def compile_ahead(
    kernels: Iterable[Kernel], capability: tuple[int, int], cache_directory: Path, workers: int | None = None
) -> int:
    """Compile what the cache lacks in forked processes, which touch no device; returns how many it lacked.

    workers  None: one for each core

    Each takes what no process has begun, of this program or another. What others are compiling, and kernels that fail,
    are left to `compile_kernel`, which waits, or tells why.
    """
    unique = {kernel.name: kernel for kernel in kernels}.values()
    missing = [kernel for kernel in unique if not _is_known(_path(kernel, capability, cache_directory))]
    random.Random(os.getpid()).shuffle(missing)  # processes that start together begin with other ones, and share them
    count = min(len(os.sched_getaffinity(0)) if workers is None else workers, len(missing))
    if len(missing) < WORTH_FORKING or count < 2:
        return len(missing)
    children = []
    for worker in range(count):
        child = fork_compiler()
        if child == 0:
            _refused.add(cache_directory)  # the parent compiles what was not kept, and says so
            try:
                first = len(missing) * worker // count
                for kernel in missing[first:] + missing[:first]:
                    with contextlib.suppress(Exception):
                        _made_once(kernel, capability, _path(kernel, capability, cache_directory), patience_s=0)
            finally:
                os._exit(0)  # no clean-up of the parent's threads, files and device
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
    """Assemble PTX to a cubin. Raises DeviceError with the assembler's log, or for an error of the assembler's own.

    specific  with the instructions that no later capability has
    lto       the same kernel as `compile_lto` gives it, to be assembled in place of the PTX, as a whole program
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
    """Whether a file is there and its header tells of this NVVM; a damaged one is found out when it is read."""
    try:
        with path.open("rb") as file:
            return _is_of_this_assembler(json.loads(file.readline()).get("assembler"))
    except (OSError, ValueError, AttributeError):
        return False


def _is_of_this_assembler(other: str) -> bool:
    return assembler() in (UNKNOWN, other)


def _read(path: Path) -> CompiledKernel | None:
    """The content of a file; None where there is none, or not the whole of what was written."""
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
    """Atomically: another process may be doing the same. A cache that cannot be written is one warning."""
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
    """A cubin, and what the linker says of it. Raises DeviceError with the linker's error."""
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
