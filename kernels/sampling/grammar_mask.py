"""This module applies a slot's grammar mask to a chunk of logits in shared memory; device functions of `sample`.

The host writes the masks of a step into pinned memory while the step runs, and after them the number of committed
tokens that they follow. Reads of one address over the bus run one after another. So only a row's first block waits for
that word, and tells the row's other blocks through the GPU's memory. Each block then reads its part of a mask, 16 bytes
a lane if rows are aligned.
"""

from typing import Any

from lowlat.kernels.common.host_word import await_host, await_told
from lowlat.kernels.sampling.select import CHUNK, GROUPS, MINUS_INFINITY, STRIDE
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32
from lowlat.kernels.toolchain.ptx import atomic_add_gpu, load_global_128, load_global_i32

__all__ = ["apply_mask", "await_masks"]

WORDS = CHUNK // 32  # of a chunk's mask


@device_function
def await_masks(ready: Any, length: Any, told: Any, first_block: Any) -> None:
    """Wait until the masks after `length` committed tokens are there, or any later ones; all threads must come here.

    ready  address of the slot's word, see `await_host`
    told   address of the row's uint32, zero before; the row's last block puts it back to zero
    first_block  whether this is the row's first block, which tells the others
    """
    if cuda.threadIdx.x == 0:
        if first_block:
            await_host(ready, length)
            atomic_add_gpu(told, uint32(1))
        else:
            await_told(told)
    cuda.syncthreads()


@device_function
def apply_mask(chunk: Any, first: Any, width: Any, mask: Any, aligned: Any) -> None:
    """Set what a row's mask forbids to minus infinity; all threads must come here.

    chunk  [CHUNK] uint32  shared: bits of the numbers, complete for the thread that owns each
    first  index of the chunk's first number, a multiple of CHUNK
    width  of the row: its mask has ceil(width / 32) words
    mask   address of the row's mask, in the host's memory: a word is read once by a block, after `await_masks`
    aligned  whether each row's mask begins at a multiple of 16 bytes
    """
    words = cuda.shared.array(WORDS, types.uint32)
    thread = int64(cuda.threadIdx.x)
    if aligned and thread < WORDS // 4:
        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
        if first + 128 * thread < width:
            a, b, c, d = load_global_128(mask + (first // 8) + 16 * thread)
        words[4 * thread], words[4 * thread + 1] = a, b
        words[4 * thread + 2], words[4 * thread + 3] = c, d
    if not aligned and thread < WORDS:
        word = uint32(0)
        if first + 32 * thread < width:
            word = uint32(load_global_i32(mask + (first // 8) + 4 * thread))
        words[thread] = word
    cuda.syncthreads()
    for group in range(GROUPS):
        place = group * STRIDE + 4 * thread
        bits = uint32(words[place >> 5] >> uint32(place & 31))
        for part in range(4):
            if uint32(bits >> uint32(part)) & uint32(1) == uint32(0):
                chunk[place + part] = uint32(MINUS_INFINITY)
    cuda.syncthreads()
