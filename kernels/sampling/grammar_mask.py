"""The masks of a slot's grammar on a chunk of logits in shared memory: device functions of `sample`.

The host writes the masks of a step into pinned memory while the step runs, and their length behind them: the count of
committed tokens that they follow. A block that needs them waits for that word alone. It knows no grammar.
"""

from typing import Any

from lowlat.kernels.common.host_word import await_host
from lowlat.kernels.sampling.select import CHUNK, GROUPS, MINUS_INFINITY, STRIDE
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32
from lowlat.kernels.toolchain.ptx import load_volatile_i32

__all__ = ["apply_mask", "await_masks"]

WORDS = CHUNK // 32  # of a chunk's mask


@device_function
def await_masks(ready: Any, length: Any) -> None:
    """Wait until the masks behind `length` committed tokens are there, or any later ones; all threads must come here.

    ready  address of the slot's word, see `await_host`
    """
    if cuda.threadIdx.x == 0:
        await_host(ready, length)
    cuda.syncthreads()


@device_function
def apply_mask(chunk: Any, first: Any, width: Any, mask: Any) -> None:
    """Set what a row's mask forbids to minus infinity; all threads must come here.

    chunk  [CHUNK] uint32  shared: bits of the numbers, complete for the thread that owns each
    first  index of the chunk's first number, a multiple of CHUNK
    width  of the row: its mask has ceil(width / 32) words
    mask   address of the row's mask, in the host's memory: a word is read once by a block, and past all caches
    """
    words = cuda.shared.array(WORDS, types.uint32)
    thread = int64(cuda.threadIdx.x)
    if thread < WORDS:
        word = uint32(0)
        if first + 32 * thread < width:
            word = uint32(load_volatile_i32(mask + (first // 8) + 4 * thread))
        words[thread] = word
    cuda.syncthreads()
    for group in range(GROUPS):
        place = group * STRIDE + 4 * thread
        bits = uint32(words[place >> 5] >> uint32(place & 31))
        for part in range(4):
            if uint32(bits >> uint32(part)) & uint32(1) == uint32(0):
                chunk[place + part] = uint32(MINUS_INFINITY)
    cuda.syncthreads()
