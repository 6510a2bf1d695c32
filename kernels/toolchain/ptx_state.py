"""This module has PTX for tiles of recurrent states in registers: a lane's few columns and some rows of a matrix.

A tile is a tuple of float32, column after column. Every sum is a chain of fused multiply-adds in order of the rows, so
that a column's bits depend on nothing else. Numba's simulator has none of these.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from lowlat.kernels.toolchain.numba_cuda import intrinsic, types
from lowlat.kernels.toolchain.ptx import f32, i64, instruction, ir_type, u32

__all__ = [
    "COLUMNS",
    "load_tile",
    "store_shared_of_peer",
    "store_tile",
    "sync_cluster_memory",
    "tile_sums",
    "update_tile",
]

COLUMNS = 2  # of a lane
WORDS = 4  # of an access of 16 bytes

# It stores a number at an address of the shared memory of the block with this rank in the cluster.
store_shared_of_peer = instruction(
    "{ .reg .b32 t; mapa.shared::cluster.u32 t, $0, $1; st.shared::cluster.f32 [t], $2; }", None, (u32, u32, f32)
)
# a barrier of all threads of a cluster, after which each sees what the others stored before
sync_cluster_memory = instruction("barrier.cluster.arrive; barrier.cluster.wait;", None, (), together=True)


def load_tile(pieces: int, stride: int) -> Any:
    """Make an intrinsic that loads a tile, bypassing L1: for each column 16 bytes at `pieces` places 128 bytes apart.

    stride  bytes from a column to the next
    """

    @intrinsic
    def load(context: Any, address: Any) -> Any:
        signature = types.UniTuple(f32, COLUMNS * WORDS * pieces)(i64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers = []
            struct = ir.LiteralStructType([ir_type(f32)] * WORDS)
            function = ir.FunctionType(struct, [ir_type(i64)])
            for offset in _offsets(pieces, stride):
                text = f"ld.global.cg.v4.f32 {{$0,$1,$2,$3}}, [$4+{offset}];"
                assembly = ir.InlineAsm(function, text, "=f,=f,=f,=f,l,~{memory}", side_effect=True)
                call = builder.call(assembly, args)
                numbers += [builder.extract_value(call, k) for k in range(WORDS)]
            return context.make_tuple(builder, signature.return_type, numbers)

        return signature, codegen

    return load


def store_tile(pieces: int, stride: int) -> Any:
    """Make an intrinsic that stores a tile to the places from which `load_tile` loads it."""

    @intrinsic
    def store(context: Any, address: Any, tile: Any) -> Any:
        signature = types.void(i64, types.UniTuple(f32, COLUMNS * WORDS * pieces))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(ir.VoidType(), [ir_type(i64)] + [ir_type(f32)] * WORDS)
            for place, offset in enumerate(_offsets(pieces, stride)):
                numbers = [builder.extract_value(args[1], WORDS * place + k) for k in range(WORDS)]
                text = f"st.global.v4.f32 [$0+{offset}], {{$1,$2,$3,$4}};"
                assembly = ir.InlineAsm(function, text, "l,f,f,f,f,~{memory}", side_effect=True)
                builder.call(assembly, [args[0], *numbers])
            return context.get_dummy_value()

        return signature, codegen

    return store


def _offsets(pieces: int, stride: int) -> Sequence[int]:
    return [column * stride + 128 * piece for column in range(COLUMNS) for piece in range(pieces)]


def tile_sums(rows: int) -> Any:
    """Make an intrinsic that multiplies a tile's columns by two vectors, each product summed over the rows in order.

    It takes a tile of `rows` rows and the vectors as words; the columns' sums with the first vector come first.
    """

    @intrinsic
    def sums(context: Any, tile: Any, first: Any, second: Any) -> Any:
        words = types.UniTuple(u32, rows)
        signature = types.UniTuple(f32, 2 * COLUMNS)(types.UniTuple(f32, COLUMNS * rows), words, words)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            totals = [ir.Constant(ir_type(f32), 0.0)] * (2 * COLUMNS)
            for row in range(rows):
                for vector in range(2):
                    factor = _number(builder, args[1 + vector], row)
                    for column in range(COLUMNS):
                        number = builder.extract_value(args[0], column * rows + row)
                        place = COLUMNS * vector + column
                        totals[place] = _fma(builder, number, factor, totals[place])
            return context.make_tuple(builder, signature.return_type, totals)

        return signature, codegen

    return sums


def update_tile(rows: int) -> Any:
    """Make an intrinsic that updates a tile by a row: s in row i, column j becomes fma(k[i], d[j], decay s).

    It takes the tile, k as words, the decay, and d of each column.
    """

    @intrinsic
    def update(context: Any, tile: Any, k: Any, decay: Any, first: Any, second: Any) -> Any:
        kind = types.UniTuple(f32, COLUMNS * rows)
        signature = kind(kind, types.UniTuple(u32, rows), f32, f32, f32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            product = ir.FunctionType(ir_type(f32), [ir_type(f32)] * 2)
            decayed = ir.InlineAsm(product, "mul.rn.f32 $0, $1, $2;", "=f,f,f", side_effect=False)
            numbers = [builder.extract_value(args[0], place) for place in range(COLUMNS * rows)]
            numbers = [builder.call(decayed, [number, args[2]]) for number in numbers]
            for row in range(rows):
                factor = _number(builder, args[1], row)
                for column in range(COLUMNS):
                    place = column * rows + row
                    numbers[place] = _fma(builder, factor, args[3 + column], numbers[place])
            return context.make_tuple(builder, signature.return_type, numbers)

        return signature, codegen

    return update


def _number(builder: Any, words: Any, place: int) -> Any:
    return builder.bitcast(builder.extract_value(words, place), ir_type(f32))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function = ir.FunctionType(ir_type(f32), [ir_type(f32)] * 3)
    assembly = ir.InlineAsm(function, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", side_effect=False)
    return builder.call(assembly, [a, b, c])
