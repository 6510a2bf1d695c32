"""In this decode GEMM of 33 to 128 rows a block copies a K step's rows once, and all its warps multiply them.

In the usual kernel eight warps divide the K steps of a tile, and their sums are added in order. Here every warp walks
the steps of the usual kernel's first warp, then those of the second, and adds the sums in the same order. So a row has
the same bits. Each warp has two weight tiles. If a block has fewer than 16 tiles, warps also divide the rows. A block's
weights and rows go through one pipeline of copies, which continues across tiles. Each pipeline stage, of one or several
steps, begins with a barrier.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowlat.kernels.gemm.decode.epilogue import make_epilogue
from lowlat.kernels.gemm.decode.mainloop import (
    make_issue_rows,
    make_issue_weights,
    make_multiply,
    make_store,
    make_to_words,
)
from lowlat.kernels.gemm.decode.partial_argmax import make_argmax
from lowlat.kernels.gemm.decode.plan import PAD, SUM_BYTES, WARPS, DecodeGemmShape
from lowlat.kernels.gemm.decode.shared_rows_plan import TILES_A_WARP, SharedRowsPlan
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, uint32

__all__ = ["shared_rows_kernel"]


def _make_after(shape: DecodeGemmShape, plan: SharedRowsPlan) -> Any:
    """A function: the tile group, the turn and the first step of a block's next stage."""
    steps, turns, stride = shape.steps, min(WARPS, shape.steps), WARPS * plan.span

    @device_function
    def after(group: Any, turn: Any, step: Any) -> Any:
        step = uint32(step + uint32(stride))
        if step >= uint32(steps):
            turn = uint32(turn + uint32(1))
            if turn == uint32(turns):
                turn, group = uint32(0), uint32(group + uint32(cuda.gridDim.x))
            step = uint32(turn)
        return group, turn, step

    return after


def _make_issue(shape: DecodeGemmShape, plan: SharedRowsPlan) -> Any:
    """Functions of a warp: the offset of a lane's weight copies, and the copies of the warp's weight tiles and rows for
    a stage."""
    tiles, tile_bytes, row_bytes, copied = plan.weight_tiles, plan.tile_bytes, 2 * shape.depth, plan.copied_row_tiles
    own_rows = replace(plan.of_warp, row_tiles=copied, weight_tiles=tiles)  # rows come after all weights
    offset_of_words, issue_tile = make_issue_weights(shape, replace(plan.of_warp, weight_tiles=1))
    (_, issue_row_tiles), apart = make_issue_rows(shape, own_rows), copied * plan.rows_bytes
    span, step_bytes, ragged, steps = plan.span, plan.step_bytes, plan.is_ragged(shape.steps), shape.steps

    @device_function
    def issue_weights(place: Any, weight: Any, group: Any, step: Any, warp: Any, lane: Any, offset: Any) -> None:
        for first in range(0, tiles, WARPS):
            own = uint32(warp + uint32(first))
            if own < uint32(tiles):
                tile = uint32(group * uint32(tiles) + own)
                for part in range(span):
                    at = uint32(step + uint32(part * WARPS))
                    if not ragged or at < uint32(steps):
                        target = uint32(place + own * uint32(tile_bytes) + uint32(part * step_bytes))
                        issue_tile(target, weight, tile, uint32(0), at, lane, offset)

    @device_function
    def issue_rows(place: Any, x: Any, step: Any, count: Any, warp: Any, lane: Any) -> None:
        first = int64(warp) * int64(copied * 8)
        if first < count:
            for part in range(span):
                at = uint32(step + uint32(part * WARPS))
                if not ragged or at < uint32(steps):
                    own = uint32(place + warp * uint32(apart) + uint32(part * step_bytes))
                    issue_row_tiles(own, x + first * int64(row_bytes), at, lane, count - first, 0)

    return offset_of_words, issue_weights, issue_rows


def _make_finish(shape: DecodeGemmShape, plan: SharedRowsPlan) -> Any:
    """A function of all threads that finishes a group's tiles, two values a thread at once."""
    best = make_argmax(shape, plan)
    epilogue = make_epilogue(shape, plan, best.keep)
    tiles, sum_bytes, threads = plan.weight_tiles, plan.sum_bytes, plan.threads
    rounds = -(-plan.row_tiles * plan.columns * epilogue.values // threads)
    locate, begin, nothing, end = epilogue.locate, epilogue.begin, epilogue.nothing, epilogue.finish

    @device_function
    def finish(
        totals: Any, group: Any, thread: Any, row_live: Any, bias: Any, residual: Any, out: Any, count: Any,
        beside: Any, scales: Any,
    ) -> None:  # fmt: skip
        for part in range(tiles):
            number = int64(group) * tiles + part
            source = uint32(totals + uint32(part * sum_bytes))
            for turn in range(0, rounds, 2):
                row, column, wanted = locate(number, uint32(thread + uint32(turn * threads)), count)
                other_row, other_column, also = locate(number, uint32(thread + uint32((turn + 1) * threads)), count)
                loaded, others = nothing(), nothing()
                if wanted:
                    loaded = begin(number, row, column, row_live, bias, residual, out, beside, scales)
                if also:
                    others = begin(number, other_row, other_column, row_live, bias, residual, out, beside, scales)
                if wanted:
                    end(source, number, row, column, loaded, out, totals, beside)
                if also:
                    end(source, number, other_row, other_column, others, out, totals, beside)

    return best.begin, finish, best.end


def shared_rows_kernel(shape: DecodeGemmShape, plan: SharedRowsPlan) -> Callable[..., None]:
    """The kernel's function, with the arguments of every decode GEMM."""
    stages, stage_bytes, tile_bytes, own = plan.stages, plan.stage_bytes, plan.tile_bytes, plan.of_warp
    groups, steps, turns, totals_at = plan.groups(shape.width), shape.steps, min(WARPS, shape.steps), plan.totals_at
    tiles, columns, row_tiles, rows_bytes = plan.weight_tiles, plan.warp_columns, plan.own_row_tiles, plan.rows_bytes
    rows_at = tiles * tile_bytes - own.weight_tiles * tile_bytes  # from where a step of a warp's own plan has them
    after, (offset_of_words, issue_weights, issue_rows) = _make_after(shape, plan), _make_issue(shape, plan)
    multiply, store, (begin_best, finish, end_best) = (
        make_multiply(shape, own),
        make_store(own),
        _make_finish(shape, plan),
    )
    num_tiles, sum_bytes, scales_at = own.weight_tiles * own.row_tiles, plan.sum_bytes, shape.scales_at
    wait, zeros, add = ptx.copies_wait(stages - 2), ptx.zeros(4 * num_tiles), ptx.fma_tiles(num_tiles, 0, num_tiles)
    words_of_lane = make_to_words(shape, own)
    span, step_bytes, ragged = plan.span, plan.step_bytes, plan.is_ragged(shape.steps)

    def decode_gemm(
        weight: Any, x: Any, row_live: Any, bias: Any, residual: Any, out: Any, bests: Any, count: Any, positions: Any,
        cosines: Any, sines: Any, k_cache: Any, v_cache: Any, table: Any, slots: Any, write_lens: Any, offsets: Any,
        kv_scales: Any, first_row: Any, _norm_weight: Any, _norm_live: Any,
    ) -> None:  # fmt: skip
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        mine, totals = uint32(base + lane * uint32(16)), uint32(base + uint32(totals_at))
        end = uint32(mine + uint32(stages * stage_bytes))
        ptx.let_next_kernel_start()
        offset = offset_of_words(lane)
        group, turn, step = uint32(cuda.blockIdx.x), uint32(0), uint32(0)
        for number in range(stages - 1):  # weights do not depend on the kernel before
            if group < uint32(groups):
                issue_weights(uint32(mine + uint32(number * stage_bytes)), weight, group, step, warp, lane, offset)
                group, turn, step = after(group, turn, step)
            ptx.copies_commit()
        ptx.wait_for_previous_kernel()
        group, turn, step = uint32(cuda.blockIdx.x), uint32(0), uint32(0)
        for number in range(stages - 1):
            if group < uint32(groups):
                issue_rows(uint32(mine + uint32(number * stage_bytes)), x, step, count, warp, lane)
                group, turn, step = after(group, turn, step)
            ptx.copies_commit()
        begin_best(totals, thread)
        across = uint32(warp % uint32(columns))
        first_tile, first_rows = (
            uint32(across * uint32(TILES_A_WARP)),
            uint32(uint32(warp // uint32(columns)) * uint32(row_tiles)),
        )
        to_tile, to_rows = (
            uint32(first_tile * uint32(tile_bytes)),
            uint32(uint32(rows_at) + first_rows * uint32(rows_bytes)),
        )
        to_words = words_of_lane(lane)
        corner = uint32((lane & uint32(3)) * uint32(2 * PAD) + (lane >> uint32(2)))
        target = uint32(totals + first_tile * uint32(sum_bytes) + first_rows * uint32(SUM_BYTES) + corner * uint32(4))
        written = (k_cache, v_cache, table, slots, write_lens, offsets, kv_scales, first_row)
        beside = (positions, cosines, sines, *written)
        here, free, tile = uint32(mine), uint32(end - uint32(stage_bytes)), uint32(cuda.blockIdx.x)
        while tile < uint32(groups):
            sums = zeros()
            for own_turn in range(turns):
                partial, at = zeros(), uint32(own_turn)
                while at < uint32(steps):
                    wait()
                    cuda.syncthreads()  # all warps' copies of the stage are here, and no warp reads the one before
                    if group < uint32(groups):
                        issue_weights(free, weight, group, step, warp, lane, offset)
                        issue_rows(free, x, step, count, warp, lane)
                        group, turn, step = after(group, turn, step)
                    ptx.copies_commit()
                    for part in range(span):
                        if not ragged or uint32(at + uint32(part * WARPS)) < uint32(steps):
                            own_step = uint32(here + uint32(part * step_bytes))
                            place = uint32(own_step + to_tile)
                            partial = multiply(partial, place, uint32(own_step + to_rows), uint32(place + to_words))
                    free, here = here, uint32(here + uint32(stage_bytes))
                    if here == end:
                        here = uint32(mine)
                    at = uint32(at + uint32(span * WARPS))
                if own_turn == 0:
                    sums = partial
                else:
                    sums = add(sums, partial, float32(1), float32(1))
            if steps < WARPS:  # as others add the sums of warps without a step
                sums = add(sums, zeros(), float32(1), float32(1))
            for part in range(TILES_A_WARP):
                store(part, uint32(target + uint32(part * sum_bytes)), sums)
            cuda.syncthreads()
            finish(totals, tile, thread, row_live, bias, residual, out, count, beside, weight + scales_at)
            tile = uint32(tile + uint32(cuda.gridDim.x))
        end_best(totals, thread, bests, count)

    return decode_gemm
