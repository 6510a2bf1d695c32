"""This module adds the weighted outputs of a row's experts to the residual stream, from the first expert to the last.

Every sum is rounded by itself, as in the reference. If experts are sharded over several GPUs, these first add up their
sums.
"""

from typing import Any

from lowlat.kernels.collectives.peers.rows import make_add_chunk, make_begin
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.common.sentinels import is_missing, next_turn
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, uint32

__all__ = ["make_sum_rows"]

TOGETHER, MOST_TURNS = 4, 2  # experts of a row whose loads are under way at once; more, where they took more turns


def make_sum_rows(width: int, top_k: int, warps: int, gpus: int = 1) -> Any:
    """A function of some warps of every block: add residual and outputs of all rows, while others still write the
    outputs.

    It takes addresses of partials [M, k, N], residual and total [M, N], how many rows there are, and the number of the
    thread among those of these warps. Partials are awaited, as `sentinels` has it.

    gpus  that have a part of every expert: what they exchange by, `PeerRows.arguments`, is the last argument
    """
    add_experts, chunks = _make_add_experts(width, top_k, gpus), width // 8
    parts = -(-chunks // 32)  # of a row

    @device_function
    def sum_rows(partials: Any, residual: Any, total: Any, rows: Any, thread: Any, peers: Any) -> None:
        blocks, lane = uint32(cuda.gridDim.x), uint32(thread & uint32(31))
        # the last blocks first: they have no more tiles than others
        part = uint32((thread >> uint32(5)) * blocks + blocks - uint32(1) - uint32(cuda.blockIdx.x))
        while part < rows * uint32(parts):
            row = uint32(part // uint32(parts))
            chunk = uint32((part - row * uint32(parts)) * uint32(32) + lane)
            if chunk < uint32(chunks):
                place = int64(row) * int64(width * 2) + int64(chunk) * int64(16)
                old = ptx.load_global_128(residual + place)
                at = partials + int64(row) * int64(4 * top_k * width) + int64(chunk) * int64(32)
                a, b, c, d = add_experts(old, at, peers, row, uint32(chunk * uint32(8)))
                ptx.store_global_128(total + place, a, b, c, d)
            part = uint32(part + uint32(warps) * blocks)

    return sum_rows


def _make_add_experts(width: int, top_k: int, gpus: int) -> Any:
    """A device function that adds its experts' outputs to 8 columns of a row's residual; returns four words."""
    together = max(TOGETHER, -(-top_k // MOST_TURNS))
    num_values, begin, add_chunk = 8 * together, make_begin(gpus, width), make_add_chunk(gpus)

    @device_function
    def load_experts(words: Any, place: Any, start: Any) -> None:
        """Load the outputs of a few experts from one on, all loads under way at once."""
        for k in range(together):
            if start + k < top_k:
                at = place + int64((start + k) * 4 * width)
                for half in range(2):
                    a, b, c, d = ptx.load_relaxed_gpu_128(at + int64(16 * half))
                    first = 8 * k + 4 * half
                    words[first], words[first + 1], words[first + 2], words[first + 3] = a, b, c, d

    @device_function
    def lacks_one(words: Any, start: Any) -> Any:
        lacks = False
        for k in range(together):
            if start + k < top_k:
                for value in range(8):
                    lacks = lacks or is_missing(words[8 * k + value])
        return lacks

    @device_function
    def add_experts(old: Any, place: Any, peers: Any, row: Any, column: Any) -> Any:
        sums, words = cuda.local.array(8, float32), cuda.local.array(num_values, uint32)
        if gpus > 1:
            begun = begin(peers, row, column)
        for value in range(8):
            sums[value] = float32(0)
        for start in range(0, top_k, together):
            load_experts(words, place, start)
            turns = uint32(0)
            while lacks_one(words, start):
                turns = next_turn(turns)
                load_experts(words, place, start)
            for k in range(together):
                if start + k < top_k:
                    for value in range(8):
                        sums[value] = ptx.add_rn(sums[value], ptx.float_of_bits(words[8 * k + value]))
        if gpus > 1:
            add_chunk(sums, peers, begun)
        return (
            ptx.bf16_pair(ptx.add_rn(low_value(old[0]), sums[0]), ptx.add_rn(high_value(old[0]), sums[1])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[1]), sums[2]), ptx.add_rn(high_value(old[1]), sums[3])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[2]), sums[4]), ptx.add_rn(high_value(old[2]), sums[5])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[3]), sums[6]), ptx.add_rn(high_value(old[3]), sums[7])),
        )

    return add_experts
