"""The one module that imports Numba's CUDA target, and how a Python function becomes PTX without a GPU.

It knows no kernel. `NUMBA_ENABLE_CUDASIM=1` gives Numba's simulator instead, which runs the integer kernels in CI.
"""

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from numba import config, cuda, float32, float64, int32, int64, uint32, uint64
    from numba.cuda import extending, types

__all__ = [
    "SIMULATED",
    "compile_ptx",
    "cuda",
    "device_function",
    "float32",
    "float64",
    "fork_compiler",
    "int32",
    "int64",
    "intrinsic",
    "types",
    "uint32",
    "uint64",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
HOPPER = (9, 0)
_compiling = threading.Lock()  # Numba's compiler is not re-entrant, and the device is replaced while it runs


def device_function(function: Callable[..., Any]) -> Any:
    """A function that kernels call; it is inlined where the compiler sees fit."""
    return cuda.jit(device=True)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function of a typing context that gives a signature and the code to generate, made callable from kernels."""
    return extending.intrinsic(function)


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
    """os.fork, while no other thread compiles: a child could never take the lock that such a thread holds."""
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child needs none
        return os.fork()


def compile_ptx(
    function: Callable[..., None], signature: tuple[Any, ...], capability: tuple[int, int], launch_bounds: Any = None
) -> tuple[str, str]:
    """Compile a kernel to PTX for a compute capability; no GPU is needed.

    launch_bounds   threads a block at most, or (threads, least blocks a multiprocessor)
    Returns the PTX and the name of its entry. Dependent launch exists from capability 9.0 on: its statements are
    left out below, where a kernel starts only after the one before it anyway.
    """
    with _compiling, _pretend_device(capability), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ptx, _ = cuda.compile_ptx(
            function, types.void(*signature), cc=capability, fastmath=False, launch_bounds=launch_bounds
        )
    if capability < HOPPER:
        ptx = re.sub(r"griddepcontrol\.\w+;", "", ptx)
    entry = re.search(r"\.entry\s+([\w$]+)", ptx)
    if entry is None:
        raise ValueError(f"{function.__name__}: the PTX has no entry")
    return ptx, entry.group(1)
