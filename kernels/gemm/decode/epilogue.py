"""The warps that finish a decode GEMM's tiles, and the table of epilogues by which they do.

An epilogue is an `Epilogue` of device functions for one value of a tile, made from the GEMM's shape and plan. Most are
values with one more operand, which `value_epilogue` composes; a further kind is a file with a function and an entry in
EPILOGUES.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lowlat.kernels.common.pipeline import Pipeline
from lowlat.kernels.gemm.decode.all_reduce_epilogue import make_all_reduce_epilogue
from lowlat.kernels.gemm.decode.epilogue_parts import Epilogue
from lowlat.kernels.gemm.decode.partial_argmax import make_argmax
from lowlat.kernels.gemm.decode.plan import ALL_REDUCE, ROTATE, WARPS, DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.gemm.decode.rotated_epilogue import make_rotated_epilogue
from lowlat.kernels.gemm.decode.value_epilogue import make_value_epilogue
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32

__all__ = ["EPILOGUES", "make_epilogue", "make_finishing"]

MakeEpilogue = Callable[[DecodeGemmShape, DecodeGemmPlan, Any], Epilogue]
# by the shape's epilogue, where it is no value with one operand; the last argument is `Best.keep`
EPILOGUES: Mapping[str, MakeEpilogue] = {
    ALL_REDUCE: lambda shape, plan, _keep: make_all_reduce_epilogue(shape, plan),
    ROTATE: lambda shape, plan, _keep: make_rotated_epilogue(shape, plan),
}


def make_epilogue(shape: DecodeGemmShape, plan: DecodeGemmPlan, keep_argmax: Any) -> Epilogue:
    """The epilogue of a GEMM; keep_argmax: `Best.keep`."""
    return EPILOGUES.get(shape.epilogue, make_value_epilogue)(shape, plan, keep_argmax)


def make_finishing(shape: DecodeGemmShape, plan: DecodeGemmPlan, pipeline: Pipeline) -> Any:
    """A function of the warps that finish: finish all tiles of a block, as the others hand them over."""
    tiles, best = plan.groups(shape.width), make_argmax(shape, plan)
    epilogue = make_epilogue(shape, plan, best.keep)
    weight_tiles, area_bytes, finishing = plan.weight_tiles, WARPS * plan.sum_bytes, plan.finishing * 32
    sets, set_bytes = plan.sets, 0 if shape.parts is None else shape.parts.count * plan.sum_bytes
    rounds = -(-plan.row_tiles * plan.columns * epilogue.values // finishing)
    begin_best, end_best = best.begin, best.end
    await_full, release, after = pipeline.await_full, pipeline.release, pipeline.after
    locate, begin, nothing, end = epilogue.locate, epilogue.begin, epilogue.nothing, epilogue.finish

    @device_function
    def finish(
        totals: Any, barriers: Any, thread: Any, row_live: Any, bias: Any, residual: Any, out: Any, bests: Any,
        count: Any, beside: Any, scales: Any,
    ) -> None:  # fmt: skip
        """beside: what ROTATE takes, or ALL_REDUCE."""
        thread = uint32(thread - uint32(WARPS * 32))
        begin_best(totals, thread)
        tile, area, parity = int64(cuda.blockIdx.x), uint32(0), uint32(0)
        while tile < tiles:
            for part in range(weight_tiles):
                for own in range(sets):
                    number = (tile * weight_tiles + part) * sets + own
                    source = totals + area * uint32(area_bytes) + uint32(own * set_bytes)
                    for turn in range(rounds):
                        row, column, wanted = locate(number, uint32(thread + uint32(turn * finishing)), count)
                        loaded = nothing()
                        if wanted:
                            loaded = begin(number, row, column, row_live, bias, residual, out, beside, scales)
                        if own == 0 and turn == 0:
                            await_full(barriers, area, parity)
                        if wanted:
                            end(source, number, row, column, loaded, out, totals, beside)
                release(barriers, area, uint32(thread & uint32(31)))
                area, parity = after(area, parity)
            tile += int64(cuda.gridDim.x)
        end_best(totals, thread, bests, count)

    return finish
