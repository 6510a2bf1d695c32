"""This module compiles Python functions to multi-threaded CPU code; it alone imports Numba's CPU target.

It is imported when the first such function is needed, so that a process that packs no weights loads no compiler.
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
    """Make a function that CPU kernels call."""
    return njit(error_model="numpy")(function)


def cpu_kernel(function: Callable[..., Any]) -> Any:
    """Compile a function whose `prange` loops run on several threads; it releases Python's GIL while it runs.

    Machine code is kept next to the module's byte code, or among the user's caches. If neither can be written, every
    process compiles it again.
    """
    options = {"parallel": True, "nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the machine code
        return njit(**options)(function)


def use_threads(count: int) -> None:
    """Let the kernels that this thread starts use `count` threads, at most NUMBA_NUM_THREADS."""
    set_num_threads(min(count, config.NUMBA_NUM_THREADS))
