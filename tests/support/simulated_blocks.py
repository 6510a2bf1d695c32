"""Runs blocks in Numba's simulator as fibers; the simulator itself has a thread of the system for each CUDA thread,
which it asks in turn whether it waits. Blocks still run one after the other."""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
from fibers import Fiber, Fibers, this_fiber
from numba.core.types import Number
from numba.cuda.simulator import kernel, kernelapi

PLAIN = {int, float, bool, np.bool_, *(kind for kind in np.sctypeDict.values() if issubclass(kind, np.number))}


class _Thread(Fiber):
    """A thread of a block, with what the simulator asks of one."""

    def __init__(self, manager: "_Blocks", block: Any, place: Any, body: Callable[[], None]) -> None:
        shape = kernel.Dim3(*manager._block_dim)
        self.blockIdx, self.threadIdx = kernel.Dim3(*block), kernel.Dim3(*place)
        self.thread_id = self.threadIdx.x + shape.x * (self.threadIdx.y + shape.y * self.threadIdx.z)
        self._manager, self._body = manager, body
        super().__init__(self.thread_id, self._named)

    def syncthreads(self) -> None:
        """Wait for the block's other threads, but those that have ended."""
        self._manager.block.meet_all()

    def all_reduce(self, value: Any) -> list[Any]:
        """The values of all lanes of a warp."""
        return self._manager.block.all_reduce(("warp", self.number // 32), 32, value)

    def _named(self) -> None:
        try:
            self._body()
        except Exception as error:
            where = f"thread {tuple(self.threadIdx)} of block {tuple(self.blockIdx)}"
            raise type(error)(f"{where}: {error}").with_traceback(error.__traceback__) from None


class _Blocks(kernel.BlockManager):  # type: ignore[misc]
    def run(self, grid_point: Any, *arguments: Any) -> None:
        places = np.ndindex(*self._block_dim)
        self.block = Fibers([_Thread(self, grid_point, place, lambda: self._f(*arguments)) for place in places])
        self._seen: set[int] = set()
        with ExitStack() as self._swapped:
            self.block.run()

    def give_cuda(self, function: Any) -> None:
        """The simulator's `cuda` for a function's module, once a block and not at every call."""
        module = id(function.__globals__)
        if module not in self._seen:
            self._seen.add(module)
            self._swapped.enter_context(kernel.swapped_cuda_module(function, kernel._get_kernel_context()))


def _call(called: Any, *arguments: Any) -> Any:
    """Call a kernel, or from within one a device function."""
    if not called._device:
        return _launch(called, *arguments)
    this_fiber()._manager.give_cuda(called.fn)
    return called.fn(*arguments)


_launch = kernel.FakeCUDAKernel.__call__


def _cast(kind: Any, *values: Any) -> Any:
    """A number as one of another kind, `int64(x)`; Numba asks first, at some length, whether it is a type. Half of all
    that kernels take in the simulator was its asking.
    """
    if len(values) == 1 and type(values[0]) in PLAIN:
        return getattr(np, kind.name)(values[0])
    return _cast_or_sign(kind, *values)


_cast_or_sign = Number.__call__


def fibers_for_threads() -> Callable[[], None]:
    """Let the simulator run blocks this way from now on; returns what gives its own way back."""
    before = kernel.BlockManager, kernelapi.threading
    kernel.BlockManager, kernelapi.threading = _Blocks, SimpleNamespace(current_thread=this_fiber)
    kernel.FakeCUDAKernel.__call__ = _call
    Number.__call__ = _cast  # type: ignore[method-assign]

    def undo() -> None:
        kernel.BlockManager, kernelapi.threading = before
        kernel.FakeCUDAKernel.__call__ = _launch
        Number.__call__ = _cast_or_sign  # type: ignore[method-assign]

    return undo
