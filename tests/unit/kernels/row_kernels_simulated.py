"""Run with NUMBA_ENABLE_CUDASIM=1: the row-wise kernels in Numba's simulator, on the CPU.

The simulator knows no shuffles. Here the threads of a warp meet and exchange values: right for shuffles in which whole
warps take part, and these kernels use no others.
"""

import ctypes
import sys
from typing import Any

import draft_input_cases
import numpy as np
import rotation_cases
import rowwise_cases as cases
import torch
from fibers import this_fiber
from kernel_cases import simulate
from numba.cuda.simulator import kernelapi
from numba.np import numpy_support
from simulated_blocks import fibers_for_threads

from lowlat.kernels.moe import router_kernel
from lowlat.kernels.sampling import select
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import SIMULATED


def from_lane(mask: int, value: Any, lane: int) -> Any:
    """The value of a lane."""
    return this_fiber().all_reduce(value)[int(lane)]


def all_reduce(mask: int, value: Any, offset: int) -> Any:
    """The value of the lane whose number differs by exclusive or."""
    thread = this_fiber()
    return thread.all_reduce(value)[thread.number % 32 ^ int(offset)]


class SharedMemory:
    """Shared arrays by 32-bit addresses: each gets a stretch of them."""

    STRETCH = 1 << 20

    def __init__(self) -> None:
        self._bases: list[int] = []

    def address(self, array: Any) -> Any:
        """The address of an array's first element."""
        base = ptx.array_address(array)
        if base not in self._bases:
            self._bases.append(base)
        return np.uint32((self._bases.index(base) + 1) * self.STRETCH)

    def _place(self, address: Any) -> int:
        return self._bases[int(address) // self.STRETCH - 1] + int(address) % self.STRETCH

    def load(self, address: Any) -> Any:
        """Four words."""
        return ptx.load_global_128(self._place(address))

    def store(self, address: Any, *words: Any) -> None:
        """Four words."""
        ptx.store_global_128(self._place(address), *words)

    def copy(self, target: Any, source: Any) -> None:
        """A copy that is done at once."""
        ctypes.memmove(self._place(target), int(source), 16)


def shared_array(block: Any, shape: Any, dtype: Any, alignment: int = 16) -> Any:
    """A block's shared array, one a line of the kernel; the simulator's own refuses an alignment."""
    kind = numpy_support.as_dtype(dtype)
    return block._allocations.setdefault(sys._getframe(1).f_lineno, np.empty(shape, kind))


def largest(value: Any) -> Any:
    """The largest of a warp's values."""
    return max(this_fiber().all_reduce(value))


def bf16_value(address: Any) -> Any:
    """A bf16 as float32."""
    return np.uint32(ctypes.c_uint16.from_address(int(address)).value << 16).view(np.float32)


def simulate_router() -> None:
    """Give the simulator what only the router uses of warps and shared memory."""
    memory = SharedMemory()
    kernelapi.FakeCUDAModule.shfl_xor_sync = staticmethod(all_reduce)
    kernelapi.FakeCUDAModule.shfl_sync = staticmethod(from_lane)
    ptx.shared_address = memory.address
    ptx.load_shared_128, ptx.store_shared_128, ptx.copy_async_16 = memory.load, memory.store, memory.copy
    ptx.load_global_bf16, ptx.copies_commit = bf16_value, lambda: None
    kernelapi.FakeCUDAShared.array = shared_array
    vars(router_kernel)["copies_wait_all"] = lambda: None


def check_wide_weights(lab: cases.Lab) -> None:
    """Weights of norms in float32; heads of which only the first elements turn."""
    wide: dict[str, Any] = {"dtype": torch.float32}
    cases.check_norms(lab, 2, 24, **wide)
    cases.check_split_norms(lab, 1, 5, 16, **wide)
    cases.check_add_norm(lab, 2, 24, torch.float32, torch.float32)
    cases.check_norm_add(lab, 2, 72, torch.float32, torch.float32, 0.7)
    cases.check_per_layer(lab, 2, 3, 24, **wide)
    cases.check_router(lab, 2, 264, 6, **wide)
    cases.check_embeddings(lab, 3, 72, 37, **wide)
    draft_input_cases.check_draft_input(lab, 2, 2, 24, packed=False, **wide)
    draft_input_cases.check_chain_level(lab, 3, 24, packed=True, masked=True, **wide)
    rotation_cases.check_chunk_write(lab, (3, 2, 32), 1e-5, (4, 0, 3), turning=8, **wide)
    rotation_cases.check_layers(lab, 2, (1, 16), 1e-6, chunk=True, turning=8, **wide)
    for heads, turning in (((2, 1, 256), 64), ((1, 1, 40), 32), ((0, 1, 24), 16)):
        rotation_cases.check_rotate(lab, heads, 1e-6, turning=turning, **wide)
    rotation_cases.check_rotate(lab, (2, 1, 64), None, turning=32)


def main() -> None:
    """Every kernel once or twice; rows above 4096 elements have several chunks a thread."""
    if not SIMULATED:
        raise SystemExit("set NUMBA_ENABLE_CUDASIM=1")
    torch.manual_seed(3)
    torch.set_num_threads(1)
    fibers_for_threads()
    simulate_router()
    vars(select)["warp_max"] = largest
    lab = cases.Lab(torch.device("cpu"), simulate)
    cases.check_elementwise(lab, 3, 24)
    cases.check_markov_heads(lab, 1, 24, 8)
    cases.check_markov_heads(lab, 3, 304, 16)
    cases.check_local_conv(lab, 4, 48, 16, 2)
    cases.check_local_conv(lab, 2, 1032, 8, 3)
    cases.check_walk(lab, 4, 6, 16, 1)
    cases.check_walk(lab, 3, 17, 264, 0)
    cases.check_norms(lab, 2, 24)
    cases.check_norms(lab, 1, 4096 + 40)
    cases.check_permutation(lab, 2880)
    cases.check_split_norms(lab, 1, 5, 16)
    cases.check_add_norm(lab, 1, 4096 + 8, torch.float32)
    cases.check_add_norm(lab, 2, 24, torch.bfloat16)
    cases.check_norm_add(lab, 2, 24, torch.float32, scalar=0.75)
    cases.check_norm_add(lab, 1, 4096 + 72, torch.bfloat16)
    cases.check_norm_add_twice(lab, 2, 72, torch.float32)
    cases.check_norm_add_twice(lab, 2, 4096 + 72, torch.bfloat16, torch.float32)
    cases.check_per_layer(lab, 3, 5, 24)
    cases.check_per_layer(lab, 1, 1, 264)
    cases.check_router(lab, 3, 264, 6)
    cases.check_router(lab, 1, 4096 + 72, 7)
    cases.check_router_extremes(lab, 64)
    cases.check_router_alone(lab, 2, 264, 6)
    cases.check_router_fills(lab, 2, 64, 3, 300)
    cases.check_embeddings(lab, 3, 72, 37)
    cases.check_embeddings(lab, 1, 4096 + 72, 18, scale=73.5)
    draft_input_cases.check_draft_input(lab, 2, 2, 24, packed=False)
    draft_input_cases.check_draft_input(lab, 1, 1, 24, packed=True)
    draft_input_cases.check_block_input(lab, 3, 2, 24, packed=True)
    draft_input_cases.check_block_input(lab, 2, 2, 24, packed=False, kept=False, batch=2)
    draft_input_cases.check_level_input(lab, 2, 2, 3, 24, packed=True)
    draft_input_cases.check_level_input(lab, 1, 1, 1, 40, packed=False)
    draft_input_cases.check_chain_level(lab, 3, 24, packed=True, masked=True)
    draft_input_cases.check_chain_level(lab, 1, 40, packed=False, masked=False)
    rotation_cases.check_chunk_write(lab, (2, 1, 16), None, (6, 8, 5))
    rotation_cases.check_chunk_write(lab, (3, 2, 8), 1e-5, (4, 0, 3))
    rotation_cases.check_chunk_write(lab, (0, 1, 16), None, (3, 16, 3), coded=True)
    rotation_cases.check_layers(lab, 2, (2, 40), None, chunk=True)
    rotation_cases.check_layers(lab, 2, (1, 16), 1e-6, chunk=True, coded=True)
    rotation_cases.check_layers(lab, 2, (1, 512), 1e-6, v_norm=True, keys_as_values=True)
    rotation_cases.check_rotate(lab, (1, 1, 512), 1e-6, v_norm=True, keys_as_values=True)
    rotation_cases.check_rotate(lab, (1, 2, 24), 1e-6, v_norm=True)
    rotation_cases.check_chunk_write(lab, (1, 1, 512), 1e-5, (3, 0, 2), keys_as_values=True, coded=True)
    for heads, eps in (((3, 1, 64), None), ((2, 1, 40), 1e-6), ((0, 1, 128), 1e-6), ((5, 0, 8), None)):
        rotation_cases.check_rotate(lab, heads, eps)
    check_wide_weights(lab)
    print("all passed")


if __name__ == "__main__":
    main()
