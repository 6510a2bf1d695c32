"""Random counters and keys for Philox."""

from typing import Any

import torch
from kernel_cases import Arrays, Bench, poisoned

from lowlat.kernels.common.memory import long_at, set_long
from lowlat.kernels.common.philox import philox, uniform
from lowlat.kernels.reference.sampling import random
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types, uint32

COUNT = 32


def _kernel(counters: Any, keys: Any, words: Any, numbers: Any) -> None:
    ptx.wait_for_previous_kernel()
    thread = int64(cuda.threadIdx.x)
    first = thread * 4
    c0, c1 = uint32(long_at(counters, first)), uint32(long_at(counters, first + 1))
    c2, c3 = uint32(long_at(counters, first + 2)), uint32(long_at(counters, first + 3))
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, uint32(long_at(keys, 0)), uint32(long_at(keys, 1)))
    set_long(words, first, int64(w0))
    set_long(words, first + 1, int64(w1))
    set_long(words, first + 2, int64(w2))
    set_long(words, first + 3, int64(w3))
    ptx.store_global_f32(numbers + thread * 4, uniform(w0))


def check_philox(bench: Bench, seed: int) -> None:
    """Words and uniform numbers, bit for bit."""
    torch.manual_seed(seed)
    counters = torch.randint(0, 2**32, (COUNT, 4))
    counters[0], counters[1] = 0, 2**32 - 1
    arrays: Arrays = {
        "counters": counters,
        "keys": torch.randint(0, 2**32, (2,)),
        "words": poisoned(COUNT, 4, dtype=torch.int64),
        "numbers": poisoned(COUNT, dtype=torch.float32),
    }

    def reference(found: Arrays) -> None:
        first, second = found["keys"].tolist()
        words = random.philox(found["counters"], (first, second))
        found["words"].copy_(words)
        found["numbers"].copy_(((2 * words[:, 0] + 1).float() * 2.0**-33).clamp(max=random.LARGEST))

    kernel = Kernel("philox_words", _kernel, (types.int64,) * 4, COUNT)
    names = ("counters", "keys", "words", "numbers")
    bench.compare(
        arrays, reference, lambda found: [KernelCall(kernel, (1, 1, 1), tuple(found[name] for name in names))]
    )
