"""The one module that imports Numba's CPU target: how a Python function becomes machine code of several threads.

It is imported when the first kernel is needed: a process that packs no weights loads no compiler.
"""

from collections.abc import Callable
from typing import Any

from numba import config, float32, njit, prange, set_num_threads
from numba.extending import intrinsic

__all__ = ["cpu_function", "cpu_kernel", "fma", "prange", "use_threads"]


@intrinsic  # type: ignore[untyped-decorator]
def fma(_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """a * b + c of float32, rounded once."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return float32(float32, float32, float32), generate


def cpu_function(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return njit(error_model="numpy")(function)


def cpu_kernel(function: Callable[..., Any]) -> Any:
    """A function whose `prange` loops share threads; it holds no lock of Python's while it runs.

    Machine code is kept next to the module's byte code, or among the user's caches; where neither can be written, every
    process compiles.
    """
    options = {"parallel": True, "nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the machine code
        return njit(**options)(function)


def use_threads(count: int) -> None:
    """Let the kernels that this thread starts use so many threads, NUMBA_NUM_THREADS at most."""
    set_num_threads(min(count, config.NUMBA_NUM_THREADS))
