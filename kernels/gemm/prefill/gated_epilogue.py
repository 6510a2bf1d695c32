"""The epilogue of a prefill GEMM with gates and ups: silu(gate) * up, arranged as rows of the next GEMM.

A tile of 16 weight rows is 8 gates and their 8 ups, so a thread has both of a channel; a block's 128 weight rows are a
step of 64 columns of the rows that it leaves. It knows no product.
"""

from typing import Any

from lowlat.kernels.common.activation import silu_times_uncalled
from lowlat.kernels.gemm.packing import RUN, TILE_ROWS
from lowlat.kernels.gemm.prefill.mainloop import Cut
from lowlat.kernels.gemm.prefill.plan import BLOCK_ROWS, STEP_ROW_BYTES, PrefillGemmPlan
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, uint32

__all__ = ["make_gated_finish"]

FULL_WARP = 0xFFFFFFFF
AT_ONCE = 8  # sums: of two runs of eight rows of x


@device_function
def _word(gates: Any, ups: Any, biases: Any, odd: Any) -> Any:
    """Two neighbouring channels of one row of x: the first of the lane's two rows where it is even, else the second."""
    gate_bias, up_bias = biases
    first = silu_times_uncalled(ptx.add_rn(gates[0], gate_bias), ptx.add_rn(ups[0], up_bias))
    second = silu_times_uncalled(ptx.add_rn(gates[1], gate_bias), ptx.add_rn(ups[1], up_bias))
    own = ptx.bf16_pair(first, second)
    other = uint32(int32(cuda.shfl_xor_sync(FULL_WARP, int32(own), 4)))
    if odd:
        return uint32(uint32(other >> uint32(16)) | uint32(own & uint32(0xFFFF0000)))
    return uint32(uint32(own & uint32(0xFFFF)) | uint32(other << uint32(16)))


@device_function
def _store(places: Any, after: Any, has_channels: Any, word: Any) -> None:
    """So many rows after the lane's first."""
    target, row_live, has_flags = places
    is_live = has_channels
    if has_flags:
        is_live = is_live and ptx.load_global_u8(row_live + int64(after)) != uint32(0)
    ptx.store_global_u32(target + int64(after * STEP_ROW_BYTES), word if is_live else uint32(0))


def _make_store_two(count: int, begin: int) -> Any:
    """A function of a thread: two runs of eight rows of x, of each two gates and two ups, from sum `begin` on."""
    take, after = ptx_hopper.take_sums(count, begin, AT_ONCE), 2 * begin

    @device_function
    def store(all_sums: Any, places: Any, has_channels: Any, biases: Any, odd: Any) -> None:
        sums = take(all_sums)
        _store(places, after, has_channels, _word((sums[0], sums[1]), (sums[2], sums[3]), biases, odd))
        _store(places, after + RUN, has_channels, _word((sums[4], sums[5]), (sums[6], sums[7]), biases, odd))

    return store


def _make_store_up_to(count: int, end: int) -> Any:
    """A function of a thread: the sums before `end` of its so many."""
    last = _make_store_two(count, end - AT_ONCE)
    if end == AT_ONCE:
        return last
    before = _make_store_up_to(count, end - AT_ONCE)

    @device_function
    def store(sums: Any, places: Any, has_channels: Any, biases: Any, odd: Any) -> None:
        before(sums, places, has_channels, biases, odd)
        last(sums, places, has_channels, biases, odd)

    return store


def make_gated_finish(cut: Cut, plan: PrefillGemmPlan, with_bias: bool) -> Any:
    """A function of a warp: store silu(gate) * up of a unit's sums, arranged; zeros past the channels and in dead rows.

    Of what stands beside the product the second address is that of the rows' flags, 0 where all are live.
    """
    weight_rows, block_tiles, x_rows = cut.weight_rows, BLOCK_ROWS // TILE_ROWS, plan.rows
    store_all = _make_store_up_to(plan.sums, plan.sums)

    @device_function
    def biases_of(bias: Any, tile: Any, channel: Any) -> Any:
        gate, up = float32(0), float32(0)
        if with_bias:
            at = bias + int64(uint32(tile * uint32(TILE_ROWS) + channel)) * int64(2)
            gate, up = ptx.load_global_bf16(at), ptx.load_global_bf16(at + int64(16))
        return gate, up

    @device_function
    def finish(
        sums: Any, beside: Any, out: Any, rows: Any, x_tile: Any, block: Any, segment: Any, part: Any, first: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        bias, row_live, _ = beside
        tile, channel = uint32(block * uint32(block_tiles) + first), uint32(lane >> uint32(2))
        has_channels, odd = tile * uint32(TILE_ROWS) < uint32(weight_rows), (channel & uint32(1)) != uint32(0)
        biases = (float32(0), float32(0))
        if has_channels:
            biases = biases_of(bias, tile, channel)
        within = uint32(uint32(lane & uint32(3)) * uint32(2) + uint32(channel & uint32(1)))  # of eight rows, the lane's
        piece = uint32(uint32(first >> uint32(2)) * uint32(4) + uint32(channel >> uint32(1)))
        place = uint32(uint32(piece ^ within) * uint32(16) + uint32(first & uint32(3)) * uint32(4))
        row = uint32(x_tile * uint32(x_rows) + within)
        target = out + (int64(block) * int64(rows) + int64(row)) * int64(STEP_ROW_BYTES) + int64(place)
        places = (target, row_live + int64(row), row_live != int64(0))
        store_all(sums, places, has_channels, biases, odd)

    return finish
