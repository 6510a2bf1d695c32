"""The chunk of 8 elements of a gated operation that a thread has: gates, rounded products with values, zeros."""

from typing import Any

from lowlat.kernels.common.norm_row import chunk_values, is_live
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32

__all__ = ["CHUNK", "THREADS", "make_gated_chunk"]

THREADS, CHUNK = 128, 8


def make_gated_chunk(width: int, product: Any, *, wide: bool) -> Any:
    """A function of a thread of a grid (M, chunks of a row of `width` elements / THREADS): store its chunk of a row.

    product  a device function (gate, value) -> float32
    wide     values are float32, else bf16; gates are float32
    It takes the addresses of the row's gates and values, of the flags of rows, 0 where all are live, and of the output.
    """

    @device_function
    def store_chunk(gates: Any, values: Any, row_live: Any, out: Any) -> None:
        row = int64(cuda.blockIdx.x)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(width // CHUNK):
            g, v = chunk_values(gates, chunk, True), chunk_values(values, chunk, wide)
            a = ptx.bf16_pair(product(g[0], v[0]), product(g[1], v[1]))
            b = ptx.bf16_pair(product(g[2], v[2]), product(g[3], v[3]))
            c = ptx.bf16_pair(product(g[4], v[4]), product(g[5], v[5]))
            d = ptx.bf16_pair(product(g[6], v[6]), product(g[7], v[7]))
            if not is_live(row_live, row):
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            ptx.store_global_128(out + row * int64(2 * width) + int64(chunk) * int64(16), a, b, c, d)

    return store_chunk
