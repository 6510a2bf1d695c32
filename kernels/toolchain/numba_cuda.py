"""This module compiles Python functions to PTX without a GPU; all others get Numba's CUDA target from it.

With `NUMBA_ENABLE_CUDASIM=1` it gives Numba's simulator instead, which runs the integer kernels in CI.
"""

import contextlib
import gc
import os
import re
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from importlib import import_module
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # numba-cuda replaces numba.cuda through a .pth file. Python reads it only in an environment's own folder, not in
    # those of PYTHONPATH or `pip install --target`
    import_module("_numba_cuda_redirector")
    from numba import config

    if not config.ENABLE_CUDASIM:
        from lowlat.kernels.toolchain import quicker_numba  # first: it imports Numba's CUDA target with any NumPy
    from numba import cuda, float32, float64, int32, int64, uint32, uint64
    from numba.cuda import extending, types

from lowlat.kernels.toolchain.kernel import HOPPER

__all__ = [
    "SIMULATED",
    "compile_lto",
    "compile_ptx",
    "cuda",
    "device_function",
    "float32",
    "float64",
    "fork_compiler",
    "int32",
    "int64",
    "intrinsic",
    "target_of",
    "types",
    "uint32",
    "uint64",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
SHARED_ARRAY = "_cudapy_smem_"  # Numba's name of an array in shared memory, before its number
RARELY = (100_000, 50, 1000)  # gc thresholds: Numba makes millions of small objects and keeps most of them
_functions: dict[Hashable, Any] = {}  # the results of `device_function`
_compiling = threading.Lock()  # Numba's compiler is not re-entrant, and the device is replaced while it runs

if not SIMULATED:
    quicker_numba.quicken()


def device_function(function: Callable[..., Any]) -> Any:
    """Make a device function, which kernels call; the compiler may inline it.

    Several kernels may make the same function: the same code that closes over the same constants and functions. They
    then share one, which is typed and lowered once a process.
    """
    key = None if SIMULATED else _meaning(function)
    if key is None:
        return cuda.jit(device=True)(function)
    if key not in _functions:  # Numba takes a while to make one
        _functions[key] = cuda.jit(device=True)(function)
    return _functions[key]


def _meaning(function: Callable[..., Any]) -> Hashable | None:
    """Return a key that is equal for functions that compile to the same; None if that cannot be decided."""
    if function.__kwdefaults__:
        return None
    try:
        cells = tuple(_typed(cell.cell_contents) for cell in function.__closure__ or ())
        key = (function.__code__, function.__module__, function.__defaults__, cells)
        hash(key)
    except (TypeError, ValueError):  # a cell's content cannot be hashed, or the cell is still empty
        return None
    return key


def _typed(value: Any) -> Hashable:
    """Return a value with its type and sign, so that 1, True and 1.0 differ, and 0.0 and -0.0."""
    if isinstance(value, tuple):
        return (tuple, *map(_typed, value))
    return type(value), value.hex() if isinstance(value, float) else value


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function of a typing context, which returns a signature and a code generator, callable from kernels."""
    return extending.intrinsic(function)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    known = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*known)


class _Capability:
    def __init__(self, capability: tuple[int, int]) -> None:
        self.compute_capability = capability


@contextlib.contextmanager
def _pretend_device(capability: tuple[int, int]) -> Iterator[None]:
    """Replace the current device by one of this capability: Numba asks for it while it types device functions.

    Nothing else in a compilation needs a device.
    """
    from numba.cuda import dispatcher

    known = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: _Capability(capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = known


def fork_compiler() -> int:
    """Call os.fork while no other thread compiles: a child could never take the lock that such a thread holds.

    The child's garbage collector skips the parent's objects: to free events and streams needs a device, which the child
    does not have. It also runs rarely: the search for cycles after each kernel took 6 % of a child's time.
    """
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads: the child needs no thread
        child = os.fork()
        if child == 0:
            gc.freeze()
            gc.set_threshold(*RARELY)
    return child


def target_of(capability: tuple[int, int], specific: bool = False) -> str:
    """Return a capability's name in PTX and the assembler. specific: with the instructions that no later one has."""
    return f"sm_{capability[0]}{capability[1]}{'a' if specific else ''}"


def _numbered_anew(ptx: str) -> str:
    """Number the functions and shared arrays of a kernel's PTX from 1, in order of appearance.

    Numba's numbers count on through a process, so that a kernel's names would depend on what was compiled before it.
    """
    arrays: dict[str, int] = {}
    functions: dict[str, int] = {}

    def array(found: re.Match[str]) -> str:
        return f"{SHARED_ARRAY}{arrays.setdefault(found[1], len(arrays) + 1)}"

    def function(found: re.Match[str]) -> str:
        size, number = found.groups()
        if int(size) != len(number) + 1:  # the tag of a function's number begins with its length
            return found[0]
        tag = f"v{functions.setdefault(number, len(functions) + 1)}"
        return f"B{len(tag)}{tag}"

    return re.sub(r"B(\d)v(\d+)(?=B)", function, re.sub(rf"{SHARED_ARRAY}(\d+)", array, ptx))


def compile_ptx(
    function: Callable[..., None],
    signature: tuple[Any, ...],
    capability: tuple[int, int],
    launch_bounds: Any = None,
    specific: bool = False,
) -> tuple[str, str]:
    """Compile a kernel to PTX for a compute capability; no GPU is needed.

    launch_bounds   the most threads a block, or (threads, least blocks an SM)
    specific        it uses instructions that only this capability has
    Returns the PTX and the name of its entry. Dependent launch exists from capability 9.0 on. Below, its statements are
    left out: there a kernel starts only after the one before it has ended.
    """
    with _compiling, _pretend_device(capability), _rare_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ptx, _ = cuda.compile_ptx(
            function, types.void(*signature), cc=capability, fastmath=False, launch_bounds=launch_bounds
        )
    ptx = _numbered_anew(ptx)
    if capability < HOPPER:
        ptx = re.sub(r"griddepcontrol\.\w+;", "", ptx)
    if specific:
        ptx = ptx.replace(f".target {target_of(capability)}\n", f".target {target_of(capability, True)}\n")
    entry = re.search(r"\.entry\s+([\w$]+)", ptx)
    if entry is None:
        raise ValueError(f"{function.__name__}: the PTX has no entry")
    return ptx, entry.group(1)


def compile_lto(
    function: Callable[..., None], signature: tuple[Any, ...], capability: tuple[int, int], launch_bounds: Any = None
) -> bytes:
    """Compile a kernel to intermediate code, which the linker optimises and assembles; arguments as `compile_ptx`."""
    with _compiling, _pretend_device(capability), _rare_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code, _ = cuda.compile(
            function, types.void(*signature), device=False, abi="numba", output="ltoir", cc=capability, fastmath=False,
            launch_bounds=launch_bounds,
        )  # fmt: skip
    return bytes(code)
