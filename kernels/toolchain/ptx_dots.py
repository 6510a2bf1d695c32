"""Products of bf16 rows in shared memory, by fused multiply-adds in a fixed order of columns.

A lane has 8 columns of every row, 16 bytes, in turns. Nothing of it has a meaning under Numba's simulator.
"""

from typing import Any

from llvmlite import ir

from lowlat.kernels.toolchain.numba_cuda import intrinsic, types
from lowlat.kernels.toolchain.ptx import f32, ir_type, u32

__all__ = ["add_across_lanes", "dot_rows"]

LANES = 32
HIGH = 0xFFFF0000
WORDS = 4  # of a chunk


def dot_rows(rows: int, others: int, turns: int, pitch: int, stride: int) -> Any:
    """An intrinsic: a lane's sums of `rows` rows times `others` rows, both in shared memory, from zero.

    It takes the addresses of the lane's first chunks; gives rows * others float32, those of a row side by side.
    pitch: bytes from row to row of either; stride: from turn to turn.
    """

    @intrinsic
    def dot(context: Any, address: Any, other_address: Any) -> Any:
        signature = types.UniTuple(f32, rows * others)(u32, u32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            real, word = ir_type(f32), ir_type(u32)
            multiply = ir.InlineAsm(
                ir.FunctionType(real, [real] * 3), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", side_effect=False
            )

            def values(packed: Any) -> list[Any]:
                low, high = builder.shl(packed, word(16)), builder.and_(packed, word(HIGH))
                return [builder.bitcast(each, real) for each in (low, high)]

            sums = [real(0.0)] * (rows * others)
            for turn in range(turns):
                loaded = [_load(builder, args[1], other * pitch + turn * stride) for other in range(others)]
                own = [[values(each) for each in words] for words in loaded]
                for row in range(rows):
                    words = _load(builder, args[0], row * pitch + turn * stride)
                    for part in range(WORDS):
                        for half, value in enumerate(values(words[part])):
                            for other in range(others):
                                operands = [value, own[other][part][half], sums[row * others + other]]
                                sums[row * others + other] = builder.call(multiply, operands)
            return context.make_tuple(builder, signature.return_type, sums)

        return signature, codegen

    return dot


def _load(builder: Any, address: Any, offset: int) -> list[Any]:
    """Four words of shared memory."""
    word = ir_type(u32)
    kind = ir.FunctionType(ir.LiteralStructType([word] * WORDS), [word])
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    found = builder.call(ir.InlineAsm(kind, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True), [address])
    return [builder.extract_value(found, number) for number in range(WORDS)]


def add_across_lanes() -> Any:
    """An intrinsic: of 32 float32 of every lane the sum over all lanes of the one that has the lane's number.

    It takes the tuple and the lane. Every sum is a butterfly's, from lanes 16 apart to neighbours: the bits of each
    are those of a butterfly of its own.
    """

    @intrinsic
    def add(context: Any, sums: Any, lane: Any) -> Any:
        signature = f32(types.UniTuple(f32, LANES), u32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir_type(u32)
            values, distance = [builder.extract_value(args[0], number) for number in range(LANES)], LANES // 2
            while distance:
                upper = builder.icmp_unsigned("!=", builder.and_(args[1], word(distance)), word(0))
                values = [
                    _add_other(builder, distance, builder.select(upper, high, low), builder.select(upper, low, high))
                    for low, high in zip(values[:distance], values[distance:], strict=True)
                ]
                distance //= 2
            return values[0]

        return signature, codegen

    return add


def _add_other(builder: Any, distance: int, kept: Any, given: Any) -> Any:
    """The sum of a number that the lane keeps and the one that the lane so far away gives."""
    real = ir_type(f32)
    text = f"{{ .reg .b32 t; shfl.sync.bfly.b32 t, $2, {distance}, 31, 0xffffffff; add.rn.f32 $0, $1, t; }}"
    assembly = ir.InlineAsm(ir.FunctionType(real, [real] * 2), text, "=f,f,f", side_effect=True)
    return builder.call(assembly, [kept, given], attrs=("convergent",))
