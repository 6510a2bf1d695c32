"""This module has the epilogue of a prefill GEMM of gates and ups, which activates and arranges them.

A tile of 16 weight rows is 8 gates and their 8 ups, so a thread has both of a channel. A block's 128 weight rows are a
step of 64 columns of the rows that it stores. Sums are complete: of one segment of K, or of all that a block has added.
"""

from typing import Any

from lowlat.kernels.common.activation import gated_activation
from lowlat.kernels.gemm.packing import RUN, TILE_ROWS
from lowlat.kernels.gemm.prefill.mainloop import Cut
from lowlat.kernels.gemm.prefill.plan import BLOCK_ROWS, STEP_ROW_BYTES, PrefillGemmPlan
from lowlat.kernels.gemm.tiles import TileFormat
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int64, uint32

__all__ = ["make_gated_finish"]

AT_ONCE = 16  # sums: of four runs of eight rows of x, whose chains of instructions go side by side
BOTH_LIVE = 0x0101  # the flags of two neighbouring rows


@device_function
def _live(places: Any, after: Any) -> Any:
    """The flags of the lane's two rows of x in a run, so many rows after the first; of no channel none is live."""
    row_live, has_flags, has_channel = places[2], places[3], places[4]
    live = uint32(BOTH_LIVE) if has_channel else uint32(0)
    if has_flags and has_channel:
        live = ptx.load_global_u16(row_live + int64(after))
    return live


def _make_store_run(weights: TileFormat, activation: str) -> Any:
    """A function of a thread: store its channel of its two rows of x in a run.

    activation of gates, by its name
    Sums are multiplied by the scales that the channel's gate and up, and then the rows of x, have, and the products
    rounded, first.
    """

    gated, is_scaled, by_codes = gated_activation(activation), weights.row_scales, weights.by_codes

    @device_function
    def number_of(sum_: Any, scale: Any, bias: Any, own: Any) -> Any:
        product = ptx.mul_rn(sum_, scale) if is_scaled else sum_
        product = ptx.mul_rn(product, own) if by_codes else product
        return ptx.add_rn(product, bias)

    @device_function
    def activated(gate: Any, up: Any, beside: Any, own: Any) -> Any:
        gate_scale, up_scale, gate_bias, up_bias = beside
        return ptx.bf16_bits(gated(number_of(gate, gate_scale, gate_bias, own), number_of(up, up_scale, up_bias, own)))

    @device_function
    def store_run(places: Any, after: Any, live: Any, gates: Any, ups: Any, beside: Any, own: Any) -> None:
        first, second = activated(gates[0], ups[0], beside, own[0]), activated(gates[1], ups[1], beside, own[1])
        at = int64(after * STEP_ROW_BYTES)
        ptx.store_global_u16(places[0] + at, first if (live & uint32(0xFF)) != uint32(0) else uint32(0))
        ptx.store_global_u16(places[1] + at, second if (live >> uint32(8)) != uint32(0) else uint32(0))

    return store_run


def _make_store_runs(count: int, begin: int, weights: TileFormat, activation: str) -> Any:
    """A function of a thread: four runs of eight rows of x, of each two gates and two ups, from sum `begin` on."""
    store_run = _make_store_run(weights, activation)
    take, after = ptx_hopper.take_sums(count, begin, AT_ONCE), 2 * begin
    take_scales = _make_take_scales(weights, count, begin)

    @device_function
    def store(all_sums: Any, places: Any, beside: Any, row_scales: Any) -> None:
        sums, own = take(all_sums), take_scales(row_scales)
        a, b = _live(places, after), _live(places, after + RUN)
        c, d = _live(places, after + 2 * RUN), _live(places, after + 3 * RUN)
        store_run(places, after, a, (sums[0], sums[1]), (sums[2], sums[3]), beside, (own[0], own[1]))
        store_run(places, after + RUN, b, (sums[4], sums[5]), (sums[6], sums[7]), beside, (own[2], own[3]))
        store_run(places, after + 2 * RUN, c, (sums[8], sums[9]), (sums[10], sums[11]), beside, (own[4], own[5]))
        store_run(places, after + 3 * RUN, d, (sums[12], sums[13]), (sums[14], sums[15]), beside, (own[6], own[7]))

    return store


def _make_store_up_to(count: int, end: int, weights: TileFormat, activation: str) -> Any:
    """A device function of a thread that returns its sums before `end`."""
    last = _make_store_runs(count, end - AT_ONCE, weights, activation)
    if end == AT_ONCE:
        return last
    before = _make_store_up_to(count, end - AT_ONCE, weights, activation)

    @device_function
    def store(sums: Any, places: Any, beside: Any, row_scales: Any) -> None:
        before(sums, places, beside, row_scales)
        last(sums, places, beside, row_scales)

    return store


def _make_row_scales(weights: TileFormat, rows: int) -> Any:
    """A function of a thread: the scales of its rows of x, by the fourth address next to the product; ones of bf16."""
    if weights.by_codes:
        load = ptx_hopper.load_row_numbers(rows)

        @device_function
        def load_scales(beside: Any, row: Any) -> Any:
            return load(beside[3] + int64(row) * int64(4))

        return load_scales

    @device_function
    def nothing(_beside: Any, _row: Any) -> Any:
        return None

    return nothing


def _make_take_scales(weights: TileFormat, sums: int, begin: int) -> Any:
    """A function of a thread: the scales of its rows of four runs, from sum `begin` of so many on; ones of bf16."""
    if weights.by_codes:
        return ptx_hopper.take_sums(sums // 2, begin // 2, AT_ONCE // 2)

    @device_function
    def ones(_row_scales: Any) -> Any:
        one = float32(1)
        return one, one, one, one, one, one, one, one

    return ones


def make_gated_finish(cut: Cut, plan: PrefillGemmPlan, with_bias: bool, activation: str) -> Any:
    """A function of a warp: store a unit's activated gates times ups, arranged; zeros past the channels and in dead
    rows.

    Of what stands next to the product the second address is that of the rows' flags, 0 where all are live. Where the
    last cluster has a block more than there are steps, that stores nothing.
    """
    weight_rows, block_tiles, x_rows = cut.weight_rows, BLOCK_ROWS // TILE_ROWS, plan.rows
    has_spare = -(-weight_rows // BLOCK_ROWS) % plan.cluster > 0
    is_scaled = cut.weights.row_scales
    store_all = _make_store_up_to(plan.sums, plan.sums, cut.weights, activation)
    load_scales = _make_row_scales(cut.weights, plan.rows)

    @device_function
    def beside_of(bias: Any, scales: Any, tile: Any, channel: Any) -> Any:
        """The scales and the biases of the channel's gate and up."""
        gate_scale, up_scale, gate, up = float32(1), float32(1), float32(0), float32(0)
        row = int64(uint32(tile * uint32(TILE_ROWS) + channel))
        if is_scaled:
            at = scales + row * int64(4)
            gate_scale, up_scale = ptx.load_global_f32(at), ptx.load_global_f32(at + int64(4 * RUN))
        if with_bias:
            at = bias + row * int64(2)
            gate, up = ptx.load_global_bf16(at), ptx.load_global_bf16(at + int64(2 * RUN))
        return gate_scale, up_scale, gate, up

    @device_function
    def finish(
        sums: Any, beside: Any, out: Any, rows: Any, x_tile: Any, block: Any, segment: Any, first: Any, lane: Any
    ) -> None:
        bias, row_live, scales = beside[0], beside[1], beside[2]
        tile, channel = uint32(block * uint32(block_tiles) + first), uint32(lane >> uint32(2))
        numbers = (float32(1), float32(1), float32(0), float32(0))
        has_channels = tile * uint32(TILE_ROWS) < uint32(weight_rows)
        if has_channels:
            numbers = beside_of(bias, scales, tile, channel)
        within = uint32(uint32(lane & uint32(3)) * uint32(2))  # of eight rows, the lane's first
        piece = uint32(uint32(first >> uint32(2)) * uint32(4) + uint32(channel >> uint32(1)))
        in_piece = uint32(uint32(first & uint32(3)) * uint32(4) + uint32(channel & uint32(1)) * uint32(2))
        row = uint32(x_tile * uint32(x_rows) + within)
        target = out + (int64(block) * int64(rows) + int64(row)) * int64(STEP_ROW_BYTES) + int64(in_piece)
        upper = target + int64(uint32(piece ^ within) * uint32(16))
        lower = target + int64(uint32(uint32(piece ^ uint32(within + uint32(1))) * uint32(16) + uint32(STEP_ROW_BYTES)))
        places = (upper, lower, row_live + int64(row), row_live != int64(0), has_channels)
        if not has_spare or uint32(block * uint32(BLOCK_ROWS)) < uint32(weight_rows):
            store_all(sums, places, numbers, load_scales(beside, row))

    return finish
