"""Run with NUMBA_ENABLE_CUDASIM=1: the row-wise kernels in Numba's simulator, on the CPU.

The simulator knows no shuffles. Here the threads of a warp meet at a barrier and exchange values: right for shuffles
in which whole warps take part, and these kernels use no others.
"""

import threading
from typing import Any

import rowwise_cases as cases
import torch
from numba.cuda.simulator import kernelapi

from lowlat.kernels.kernel import KernelCall
from lowlat.kernels.numba_cuda import SIMULATED, cuda


class Warps:
    """Butterfly shuffles of the simulator's threads; blocks run one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._barriers: dict[int, threading.Barrier] = {}
        self._values: dict[int, Any] = {}

    def exchange(self, mask: int, value: Any, offset: int) -> Any:
        """The value of the lane whose number differs by exclusive or."""
        thread = int(threading.current_thread().threadIdx.x)  # type: ignore[attr-defined]
        with self._lock:
            barrier = self._barriers.setdefault(thread >> 5, threading.Barrier(32))
        self._values[thread] = value
        barrier.wait()
        other = self._values[thread ^ int(offset)]
        barrier.wait()
        return other


def simulate(*calls: KernelCall) -> None:
    """Run calls on tensors of the CPU."""
    for call in calls:
        arguments: list[Any] = []
        for kind, argument in zip(call.kernel.signature, call.arguments, strict=True):
            if not isinstance(argument, torch.Tensor):
                arguments.append(argument)
            else:
                arguments.append(argument.numpy() if hasattr(kind, "ndim") else argument.data_ptr())
        cuda.jit(call.kernel.function)[call.grid, call.kernel.threads](*arguments)


def main() -> None:
    """Every kernel once or twice; rows above 4096 elements have several chunks a thread."""
    if not SIMULATED:
        raise SystemExit("set NUMBA_ENABLE_CUDASIM=1")
    torch.manual_seed(3)
    kernelapi.FakeCUDAModule.shfl_xor_sync = Warps().exchange
    lab = cases.Lab(torch.device("cpu"), simulate)
    cases.check_elementwise(lab, 3, 24)
    cases.check_norms(lab, 2, 24)
    cases.check_norms(lab, 1, 4096 + 40)
    cases.check_order(lab, 2880)
    cases.check_split_norms(lab, 1, 5, 16)
    cases.check_add_norm(lab, 2, 4096 + 8, torch.float32)
    cases.check_add_norm(lab, 2, 24, torch.bfloat16)
    cases.check_embeddings(lab, 3, 72, 37)
    cases.check_embeddings(lab, 2, 4096 + 72, 18)
    cases.check_head_input(lab, 2, 2, 24, packed=False)
    cases.check_head_input(lab, 1, 1, 4096 + 8, packed=True)
    cases.check_level_input(lab, 2, 2, 3, 24, packed=True)
    cases.check_level_input(lab, 1, 1, 1, 4096 + 8, packed=False)
    for heads, eps in (((3, 1, 64), None), ((2, 1, 40), 1e-6), ((0, 1, 128), 1e-6), ((5, 0, 8), None)):
        cases.check_rotate(lab, heads, eps)
    print("all passed")


if __name__ == "__main__":
    main()
