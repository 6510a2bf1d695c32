"""This module has the PTX of attention by warpgroups, over tuples of registers: products of 9.0, and softmax.

A product's sums have 64 rows. A lane has rows g and g + 8 of its warp's 16, where g is a quarter of the lane. Of each 8
columns it has two, 2 t and 2 t + 1, where t is the lane's lowest two bits. In a tuple a tile of 8 columns is four
numbers: two of the upper row, two of the lower row. Sums may not be used before `await_products` has returned them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from lowlat.kernels.toolchain.numba_cuda import intrinsic, types
from lowlat.kernels.toolchain.ptx import f32, i32, i64, instruction, ir_type, u32
from lowlat.kernels.toolchain.ptx_hopper import LOWER, SLICE_UNITS, SWIZZLED_128

__all__ = [
    "add_rows",
    "await_products",
    "await_scores",
    "cap_rows",
    "fence_copies",
    "hide",
    "largest_of_rows",
    "multiply_scores",
    "multiply_values",
    "pack_rows",
    "scale_rows",
    "store_pieces",
    "store_row",
    "sync_group",
    "sync_two_groups",
    "weigh_rows",
]

SLICE = 16  # columns of the first matrix in one instruction
ROW_BYTES = 128  # bytes of a row of a half, of 64 numbers
HALF = 64  # columns of a half
GROUP_ROWS = 64

# It makes plain stores and copies to shared memory visible to products that begin later.
fence_copies = instruction("fence.proxy.async.shared::cta;", None, ())
# a barrier of the four warps of a warpgroup, by its number
sync_group = instruction("bar.sync $0, 128;", None, (u32,), together=True)
# and of two warpgroups
sync_two_groups = instruction("bar.sync $0, 256;", None, (u32,), together=True)


def _statement(text: str, outputs: Any, inputs: Sequence[tuple[Any, int]], *, tied: bool = False) -> Any:
    """Make an intrinsic of statements of PTX over tuples of registers.

    outputs  kind and count of the returned tuple; None: nothing is returned
    inputs   kinds and counts of the arguments; count 0: a single number, no tuple
    tied     the first argument has the registers of the outputs
    """
    kind, count = outputs or (f32, 0)
    letters = {f32: "f", u32: "r", i32: "r", i64: "l"}
    constraints = [f"={letters[kind]}"] * count
    for number, (each, size) in enumerate(inputs):
        own = [str(place) for place in range(size)] if tied and number == 0 else [letters[each]] * (size or 1)
        constraints += own
    kinds = [types.UniTuple(each, size) if size else each for each, size in inputs]
    signature = (types.UniTuple(kind, count) if count else types.void)(*kinds)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for (_, size), argument in zip(inputs, args, strict=True):
            values += [builder.extract_value(argument, place) for place in range(size)] if size else [argument]
        returned = ir.LiteralStructType([ir_type(kind)] * count) if count else ir.VoidType()
        function = ir.FunctionType(returned, [value.type for value in values])
        assembly = ir.InlineAsm(function, text, ",".join([*constraints, "~{memory}"]), side_effect=True)
        call = builder.call(assembly, values, attrs=("convergent",))
        if not count:
            return context.get_dummy_value()
        found = [builder.extract_value(call, place) for place in range(count)]
        return context.make_tuple(builder, signature.return_type, found)

    given: dict[int, Any] = {
        1: lambda context, a: (signature, codegen),
        2: lambda context, a, b: (signature, codegen),
        3: lambda context, a, b, c: (signature, codegen),
        4: lambda context, a, b, c, d: (signature, codegen),
        5: lambda context, a, b, c, d, e: (signature, codegen),
    }
    return intrinsic(given[len(inputs)])


def _listed(first: int, count: int) -> str:
    return ",".join(f"${place}" for place in range(first, first + count))


def multiply_scores(dim: int, keys: int) -> Any:
    """Make an intrinsic of a warpgroup that begins the products of its 64 queries by `keys` keys, from zero.

    A lane has keys / 2 sums. It takes the shared addresses of queries and of keys, each in halves of 64 columns: rows
    of 128 bytes, swizzled.
    """
    count = keys // 2
    lines = [
        f"{{ .reg .pred p, q; .reg .b32 a, b, c; .reg .b64 d, e; mov.b32 c, {SWIZZLED_128};",
        f"setp.ne.u32 p, ${count}, ${count}; setp.eq.u32 q, ${count}, ${count};",
        f"shr.u32 a, ${count}, 4; or.b32 a, a, {LOWER}; shr.u32 b, ${count + 1}, 4; or.b32 b, b, {LOWER};",
        "wgmma.fence.sync.aligned;",
    ]
    for part in range(dim // SLICE):
        if part and part % (HALF // SLICE) == 0:
            back = (HALF // SLICE - 1) * SLICE_UNITS
            lines += [
                f"add.u32 a, a, {GROUP_ROWS * ROW_BYTES // 16 - back}; add.u32 b, b, {keys * ROW_BYTES // 16 - back};"
            ]
        elif part:
            lines += [f"add.u32 a, a, {SLICE_UNITS}; add.u32 b, b, {SLICE_UNITS};"]
        lines += [
            "mov.b64 d, {a, c}; mov.b64 e, {b, c};",
            f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.bf16.bf16",
            f"{{{_listed(0, count)}}}, d, e, {'q' if part else 'p'}, 1, 1, 0, 0;",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    return _statement(" ".join(lines), (f32, count), [(u32, 0), (u32, 0)])


def multiply_values(dim: int, keys: int) -> Any:
    """Make an intrinsic of a warpgroup that begins to add the products of its 64 rows of weights by values.

    It takes dim / 2 sums, the weights of `keys` keys from `pack_rows`, and the shared address of values: rows of 128
    bytes a key, swizzled, in halves of 64 columns.
    """
    count, words, address = dim // 2, dim, dim + keys // 4
    lines = [
        f"{{ .reg .pred q; .reg .b32 a, c; .reg .b64 d; mov.b32 c, {SWIZZLED_128};",
        f"setp.eq.u32 q, ${address}, ${address};",
        f"shr.u32 a, ${address}, 4; or.b32 a, a, {keys * ROW_BYTES // 16 << 16};",
        "wgmma.fence.sync.aligned;",
    ]
    for part in range(keys // SLICE):
        lines += [
            "mov.b64 d, {a, c};",
            f"wgmma.mma_async.sync.aligned.m64n{dim}k16.f32.bf16.bf16",
            f"{{{_listed(0, count)}}}, {{{_listed(words + 4 * part, 4)}}}, d, q, 1, 1, 1;",
            f"add.u32 a, a, {SLICE * ROW_BYTES // 16};",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    return _statement(" ".join(lines), (f32, count), [(f32, count), (u32, keys // 4), (u32, 0)], tied=True)


def await_scores(keys: int, pending: int) -> Any:
    """Make an intrinsic of a warpgroup that waits until at most `pending` products are in flight.

    It takes and returns the scores, keys / 2.
    """
    count = keys // 2
    return _statement(f"wgmma.wait_group.sync.aligned {pending};", (f32, count), [(f32, count)], tied=True)


def await_products(dim: int, keys: int) -> Any:
    """Make an intrinsic of a warpgroup that waits for all products; it takes and returns the sums of `multiply_values`.

    It also takes the words of `multiply_values`, so that their registers stay until then.
    """
    count = dim // 2
    inputs = [(f32, count), (u32, keys // 4)]
    return _statement("wgmma.wait_group.sync.aligned 0;", (f32, count), inputs, tied=True)


def cap_rows(count: int, limit: float) -> Any:
    """Make an intrinsic that caps scores: s becomes c tanh(s k / c), computed as c - 2 c / (2^(f s) + 1).

    It takes the scores and f = 2 k log2(e) / c; `limit` is c.
    """
    whole, double = (f"0f{int(np.float32(value).view(np.uint32)):08X}" for value in (limit, -2.0 * limit))
    lines = ["{ .reg .f32 t;"]
    for place in range(count):
        lines += [
            f"mul.rn.f32 t, ${place}, ${2 * count}; ex2.approx.ftz.f32 t, t; add.rn.f32 t, t, 0f3F800000;",
            f"rcp.approx.f32 t, t; fma.rn.f32 ${place}, t, {double}, {whole};",
        ]
    return _statement(" ".join([*lines, "}"]), (f32, count), [(f32, count), (f32, 0)], tied=True)


def hide(count: int) -> Any:
    """Make an intrinsic that sets the scores of columns that a row does not see to -inf.

    It takes the scores, then int32: the last and the first column that the upper row sees, each less 2 t, and the same
    for the lower row.
    """
    lines = ["{ .reg .pred p;"]
    for place in range(count):
        column, base = 8 * (place // 4) + place % 2, 2 * count if place % 4 < 2 else 2 * count + 2
        lines += [
            f"setp.ge.s32 p, ${base}, {column}; setp.le.and.s32 p, ${base + 1}, {column}, p;",
            f"selp.f32 ${place}, ${place}, 0fFF800000, p;",
        ]
    return _statement(" ".join([*lines, "}"]), (f32, count), [(f32, count), *[(i32, 0)] * 4], tied=True)


def largest_of_rows(count: int) -> Any:
    """Make an intrinsic that returns the largest of a lane's scores and a number, for the upper and the lower row."""
    lines = []
    for row, own in enumerate(_of_rows(count)):
        lines += [f"max.f32 a{row}, ${2 + own[0]}, ${2 + count + row}; mov.f32 b{row}, ${2 + own[1]};"]
        for one, other in zip(own[2::2], own[3::2], strict=True):
            lines += [f"max.f32 a{row}, a{row}, ${2 + one}; max.f32 b{row}, b{row}, ${2 + other};"]
    text = f"{{ .reg .f32 a<2>, b<2>; {' '.join(lines)} max.f32 $0, a0, b0; max.f32 $1, a1, b1; }}"
    return _statement(text, (f32, 2), [(f32, count), (f32, 0), (f32, 0)])


def _of_rows(count: int) -> list[list[int]]:
    """Return the places of a lane's numbers of the upper row and of the lower row, in order of columns."""
    return [[4 * tile + 2 * row + part for tile in range(count // 4) for part in range(2)] for row in range(2)]


def weigh_rows(count: int) -> Any:
    """Make an intrinsic that makes weights: 2^(scale * score + its row's number); takes scores, scale, two numbers."""
    lines = ["{ .reg .f32 t;"]
    for place in range(count):
        offset = 2 * count + 1 + (place % 4 >= 2)
        lines += [f"fma.rn.f32 t, ${place}, ${2 * count}, ${offset}; ex2.approx.ftz.f32 ${place}, t;"]
    return _statement(" ".join([*lines, "}"]), (f32, count), [(f32, count), *[(f32, 0)] * 3], tied=True)


def add_rows(count: int) -> Any:
    """Make an intrinsic that adds up a lane's weights of the upper row, and of the lower row."""
    lines = []
    for row, own in enumerate(_of_rows(count)):
        lines += [f"mov.f32 a{row}, ${2 + own[0]}; mov.f32 b{row}, ${2 + own[1]};"]
        for one, other in zip(own[2::2], own[3::2], strict=True):
            lines += [f"add.rn.f32 a{row}, a{row}, ${2 + one}; add.rn.f32 b{row}, b{row}, ${2 + other};"]
    text = f"{{ .reg .f32 a<2>, b<2>; {' '.join(lines)} add.rn.f32 $0, a0, b0; add.rn.f32 $1, a1, b1; }}"
    return _statement(text, (f32, 2), [(f32, count)])


def scale_rows(count: int) -> Any:
    """Make an intrinsic that multiplies sums of the upper row by one number, those of the lower row by another."""
    lines = [f"mul.rn.f32 ${place}, ${place}, ${2 * count + (place % 4 >= 2)};" for place in range(count)]
    return _statement(" ".join(lines), (f32, count), [(f32, count), (f32, 0), (f32, 0)], tied=True)


def pack_rows(count: int) -> Any:
    """Make an intrinsic that packs neighbours to pairs of bf16: fragments of the first matrix, 4 words a slice."""
    words = count // 2
    lines = [f"cvt.rn.bf16x2.f32 ${word}, ${words + 2 * word + 1}, ${words + 2 * word};" for word in range(words)]
    return _statement(" ".join(lines), (u32, words), [(f32, count)])


def store_row(words: int, half: int) -> Any:
    """Make an intrinsic that stores a lane's words of the upper row (half 0) or the lower row to global memory.

    They are stored 16 bytes apart from an address on.
    """
    lines = [f"st.global.u32 [$0+{16 * tile}], ${1 + 2 * tile + half};" for tile in range(words // 2)]
    return _statement(" ".join(lines), None, [(i64, 0), (u32, words)])


def store_pieces(words: int, half: int) -> Any:
    """Make an intrinsic that stores a lane's words of the upper row (half 0) or the lower row.

    It stores 16 bytes to each of several addresses. Every four tiles of 8 columns are the lane's piece of 32 columns,
    as `arrange` orders them.
    """
    count = words // 8
    operands = [[f"${count + 2 * (4 * piece + tile) + half}" for tile in range(4)] for piece in range(count)]
    lines = [f"st.global.v4.u32 [${piece}], {{{', '.join(each)}}};" for piece, each in enumerate(operands)]
    return _statement(" ".join(lines), None, [(i64, count), (u32, words)])
