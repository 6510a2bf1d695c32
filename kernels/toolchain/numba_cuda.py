"""The one module that takes Numba's CUDA target for others, and how a Python function becomes PTX without a GPU.

`NUMBA_ENABLE_CUDASIM=1` gives Numba's simulator instead, which runs the integer kernels in CI.
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
    # numba-cuda takes its place by a .pth file, which Python reads in an environment's own folder alone: not in those
    # of PYTHONPATH or `pip install --target`
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
RARELY = (100_000, 50, 1000)  # Numba makes millions of small objects and keeps most: to look for cycles is in vain
_functions: dict[Hashable, Any] = {}  # what `device_function` has made
_compiling = threading.Lock()  # Numba's compiler is not re-entrant, and the device is replaced while it runs

if not SIMULATED:
    quicker_numba.quicken()


def device_function(function: Callable[..., Any]) -> Any:
    """A function that kernels call; it is inlined where the compiler sees fit.

    Functions of one code that close over the same constants and functions are one, however many kernels make them: each
    is typed and lowered once a process.
    """
    key = None if SIMULATED else _meaning(function)
    if key is None:
        return cuda.jit(device=True)(function)
    if key not in _functions:  # to make one takes Numba a while
        _functions[key] = cuda.jit(device=True)(function)
    return _functions[key]


def _meaning(function: Callable[..., Any]) -> Hashable | None:
    """Equal for functions that compile to the same; None where that cannot be told."""
    if function.__kwdefaults__:
        return None
    try:
        cells = tuple(_typed(cell.cell_contents) for cell in function.__closure__ or ())
        key = (function.__code__, function.__module__, function.__defaults__, cells)
        hash(key)
    except (TypeError, ValueError):  # a cell that cannot be hashed, or is not yet filled
        return None
    return key


def _typed(value: Any) -> Hashable:
    """A value that differs from an equal one that is something else, as 1 is from True and 1.0, and 0.0 from -0.0."""
    if isinstance(value, tuple):
        return (tuple, *map(_typed, value))
    return type(value), value.hex() if isinstance(value, float) else value


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function of a typing context that gives a signature and the code to generate, made callable from kernels."""
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
    """Device functions ask for the current device's capability while they are typed; no device is needed else."""
    from numba.cuda import dispatcher

    known = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: _Capability(capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = known


def fork_compiler() -> int:
    """os.fork, while no other thread compiles: a child could never take the lock that such a thread holds.

    Nor may a child collect what was garbage before: events and streams would ask a device that it does not have. It
    does nothing but compile: looking for cycles after each kernel took 6 % of its time.
    """
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks next to threads: the child needs none
        child = os.fork()
        if child == 0:
            gc.freeze()
            gc.set_threshold(*RARELY)
    return child


def target_of(capability: tuple[int, int], specific: bool = False) -> str:
    """The name of a capability in PTX and the assembler. specific: with the instructions that no later one has."""
    return f"sm_{capability[0]}{capability[1]}{'a' if specific else ''}"


def _numbered_anew(ptx: str) -> str:
    """PTX whose functions and shared arrays are numbered from 1 in the order in which they come.

    Numba numbers them as it meets them, so that what a process compiled before stood in a kernel's names.
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

    launch_bounds   threads a block at most, or (threads, least blocks an SM)
    specific        it has instructions of this capability alone
    Returns the PTX and the name of its entry. Dependent launch exists from capability 9.0 on: its statements are
    left out below, where a kernel starts only after the one before it anyway.
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
    """Compile a kernel to the intermediate code that a linker optimises and assembles; arguments as `compile_ptx`."""
    with _compiling, _pretend_device(capability), _rare_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code, _ = cuda.compile(
            function, types.void(*signature), device=False, abi="numba", output="ltoir", cc=capability, fastmath=False,
            launch_bounds=launch_bounds,
        )  # fmt: skip
    return bytes(code)
