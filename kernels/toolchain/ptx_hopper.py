"""This module has PTX that is new in capability 9.0: bulk copies with barriers that count bytes, and `wgmma`.

A warpgroup is four warps. `multiply_group` exists on 9.0 only, so kernels with it are `specific`. Numba's simulator has
none of these.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from lowlat.kernels.toolchain.numba_cuda import intrinsic, types
from lowlat.kernels.toolchain.ptx import f32, i64, instruction, ir_type, u32

__all__ = [
    "KEPT_AS_USUAL",
    "READ_ONCE",
    "SLICES",
    "add_tiles",
    "await_group",
    "barrier_arrive_at",
    "barrier_expect",
    "cluster_rank",
    "copy_bulk",
    "copy_bulk_hinted",
    "copy_bulk_to_pair",
    "fence_barriers",
    "give_registers",
    "load_row_numbers",
    "load_sums",
    "multiply_group",
    "replace_words",
    "store_group_half",
    "store_scaled_half",
    "store_sums",
    "sync_cluster",
    "take_registers",
    "take_sums",
    "use_words",
]

SLICES = 4  # slices of 16 columns in a step
# The second matrix in shared memory has rows of 128 bytes, whose 16-byte pieces are swizzled; 8 rows are 1024 bytes.
# This is the upper half of its descriptor; the lower half has the address in units of 16 bytes.
SWIZZLED_128 = 1 << 30 | 1024 >> 4
LOWER = 1 << 16  # a stride that this layout ignores
SLICE_UNITS = 2  # from a slice of 16 columns to the next

# It makes earlier changes of barriers visible to copies that are issued later.
fence_barriers = instruction("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", None, ())
# It arrives at a barrier, and makes its phase wait for more bytes.
barrier_expect = instruction("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [$0], $1; }", None, (u32, u32))
# It copies from global to shared memory: target, source, bytes (all multiples of 16), the barrier that counts them.
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
copy_bulk = instruction(f"{_BULK} [$0], [$1], $2, [$3];", None, (u32, i64, u32, u32))
# the same with one of the L2 policies below: data that is read once is evicted first (its number as in `ptx`)
copy_bulk_hinted = instruction(f"{_BULK}.L2::cache_hint [$0], [$1], $2, [$3], $4;", None, (u32, i64, u32, u32, i64))
# It copies to the same place in both blocks of a cluster of two; each block's barrier counts the bytes.
copy_bulk_to_pair = instruction(
    f"{{ .reg .b16 m; mov.b16 m, 3; {_BULK}.multicast::cluster [$0], [$1], $2, [$3], m; }}", None, (u32, i64, u32, u32)
)
# a block's rank in its cluster
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", u32, (), pure=True)
# a barrier of all threads of a cluster; it orders no memory accesses
sync_cluster = instruction("barrier.cluster.arrive.relaxed; barrier.cluster.wait;", None, (), together=True)
# It arrives at the barrier at this address in the block of this rank. It publishes no writes to that block, for which
# a fence of all memory would be needed. It only signals that reads are done, whose values have been used.
barrier_arrive_at = instruction(
    "{ .reg .b32 t; mapa.shared::cluster.u32 t, $0, $1; mbarrier.arrive.shared::cluster.b64 _, [t]; }",
    None,
    (u32, u32),
)
KEPT_AS_USUAL, READ_ONCE = 0x1000000000000000, 0x12F0000000000000


def give_registers(kept: int) -> Any:
    """Make an intrinsic of a warpgroup that keeps `kept` registers a thread, a multiple of 8, and releases others."""
    return instruction(f"setmaxnreg.dec.sync.aligned.u32 {kept};", None, (), together=True)


def take_registers(wanted: int) -> Any:
    """Make an intrinsic of a warpgroup that waits until it can have `wanted` registers a thread, a multiple of 8."""
    return instruction(f"setmaxnreg.inc.sync.aligned.u32 {wanted};", None, (), together=True)


def multiply_group(rows: int, slices: int = SLICES, *, by_codes: bool = False) -> Any:
    """Make an intrinsic of a warpgroup that begins to multiply 64 weight rows by `rows` rows of the second matrix.

    slices: number of slices of 16 columns; SLICES are a step. by_codes: slices have 32 columns, and both matrices are
    e4m3 codes, not bf16; tensor cores then keep sums with some 13 bits after the leading bit of the largest summand.
    It takes the sums, float32; a lane's words of the weights, two a slice, of all columns for row g, then for row
    g + 8, where g is a quarter of the lane; the shared address of the second matrix; and a number, zero if the sums
    begin again from zero. The returned accumulators are valid after `await_group` has returned them, and may not be
    used before.
    """
    count, held_words = rows // 2, 4 * slices
    text = _multiply_text(rows, count, slices, by_codes)
    tied = [str(number) for number in range(count)]
    constraints = ",".join(["=f"] * count + tied + ["r"] * (held_words + 2) + ["~{memory}"])

    @intrinsic
    def multiply(context: Any, sums: Any, words: Any, address: Any, go_on: Any) -> Any:
        kinds = types.UniTuple(f32, count)
        signature = kinds(kinds, types.UniTuple(u32, held_words), u32, u32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operands = [ir_type(f32)] * count + [ir_type(u32)] * (held_words + 2)
            function = ir.FunctionType(ir.LiteralStructType([ir_type(f32)] * count), operands)
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            values = [builder.extract_value(args[0], number) for number in range(count)]
            values += [builder.extract_value(args[1], number) for number in range(held_words)]
            call = builder.call(assembly, [*values, args[2], args[3]], attrs=("convergent",))
            found = [builder.extract_value(call, number) for number in range(count)]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return multiply


def _multiply_text(rows: int, count: int, slices: int, by_codes: bool) -> str:
    """Write the PTX that begins the products of all slices one after another, to be awaited together."""
    shape, last = ("k32.f32.e4m3.e4m3", "1, 1") if by_codes else ("k16.f32.bf16.bf16", "1, 1, 0")
    words = 2 * count
    address, go_on, own = words + 4 * slices, words + 4 * slices + 1, 2 * slices
    sums = ",".join(f"${number}" for number in range(count))
    lines = [
        f"{{ .reg .pred p, q; .reg .b32 a, b; .reg .b64 d; mov.b32 b, {SWIZZLED_128};",
        f"setp.ne.u32 p, ${go_on}, 0; setp.eq.u32 q, ${go_on}, ${go_on};",
        f"shr.u32 a, ${address}, 4; or.b32 a, a, {LOWER};",
        "wgmma.fence.sync.aligned;",
    ]
    for part in range(slices):
        first = words + 2 * part  # two words of row g, and the same two of row g + 8
        operands = f"${first},${first + own},${first + 1},${first + own + 1}"
        lines += [
            "mov.b64 d, {a, b};",
            f"wgmma.mma_async.sync.aligned.m64n{rows}{shape}",
            f"{{{sums}}}, {{{operands}}}, d, {'q' if part else 'p'}, {last};",
            f"add.u32 a, a, {SLICE_UNITS};",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    return " ".join(lines)


def await_group(rows: int, words: int = 4 * SLICES, under_way: int = 0) -> Any:
    """Make an intrinsic of a warpgroup that waits for all `wgmma` in flight, except the last `under_way`.

    words: the number of words that `multiply_group` took. It takes and returns the sums. It also takes the words of the
    products that it waits for, so that their registers are not overwritten before.
    """
    count = rows // 2
    tied = [str(number) for number in range(count)]
    constraints = ",".join(["=f"] * count + tied + ["r"] * words + ["~{memory}"])

    @intrinsic
    def wait(context: Any, sums: Any, used: Any) -> Any:
        kinds = types.UniTuple(f32, count)
        signature = kinds(kinds, types.UniTuple(u32, words))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            returned = ir.LiteralStructType([ir_type(f32)] * count)
            function = ir.FunctionType(returned, [ir_type(f32)] * count + [ir_type(u32)] * words)
            text = f"wgmma.wait_group.sync.aligned {under_way};"
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            values = [builder.extract_value(args[0], number) for number in range(count)]
            values += [builder.extract_value(args[1], number) for number in range(words)]
            call = builder.call(assembly, values, attrs=("convergent",))
            found = [builder.extract_value(call, number) for number in range(count)]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return wait


def replace_words(count: int) -> Any:
    """Make an intrinsic that returns the first of two tuples of words, or the second if a number is not zero.

    The number is always zero. The assembler assumes that a `wgmma` needs its words no more once it has begun, and would
    load others into their registers. So this uses the words once more, after the wait for the `wgmma`.
    """

    @intrinsic
    def replace(context: Any, words: Any, others: Any, number: Any) -> Any:
        kinds = types.UniTuple(u32, count)
        signature = kinds(kinds, kinds, u32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(ir_type(u32), [ir_type(u32)] * 3)
            text = "{ .reg .pred p; setp.ne.u32 p, $3, 0; selp.b32 $0, $2, $1, p; }"
            assembly = ir.InlineAsm(function, text, "=r,r,r,r,~{memory}", side_effect=True)
            pairs = [[builder.extract_value(each, place) for each in args[:2]] for place in range(count)]
            found = [builder.call(assembly, [*pair, args[2]]) for pair in pairs]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return replace


def use_words(slices: int) -> Any:
    """Make an intrinsic that stores the words of a product of `slices` slices if a number is not zero.

    The number is always zero. After the wait for a product it keeps the product's words in their registers until then.
    It also fixes the registers of a product that is awaited in the next turn of a loop. Otherwise the assembler does
    not know where its words come from, and reserves registers for each loop's words in all other loops.
    """
    own = 2 * slices

    @intrinsic
    def use(context: Any, words: Any, never: Any) -> Any:
        signature = types.void(types.UniTuple(u32, 4 * slices), u32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lines = ["{ .reg .pred p;", f"setp.ne.u32 p, ${4 * slices}, 0;"]
            for first in range(0, own, 2):
                operands = f"${first},${first + own},${first + 1},${first + own + 1}"
                lines.append(f"@p st.shared.v4.u32 [${4 * slices}], {{{operands}}};")
            function = ir.FunctionType(ir.VoidType(), [ir_type(u32)] * (4 * slices + 1))
            constraints = ",".join([*["r"] * (4 * slices + 1), "~{memory}"])
            assembly = ir.InlineAsm(function, " ".join([*lines, "}"]), constraints, side_effect=True)
            values = [builder.extract_value(args[0], number) for number in range(4 * slices)]
            builder.call(assembly, [*values, args[1]])
            return context.get_dummy_value()

        return signature, codegen

    return use


def add_tiles(count: int) -> Any:
    """Make an intrinsic that adds two tuples of `count` float32 one by one, each sum rounded by itself."""

    @intrinsic
    def add(context: Any, first: Any, second: Any) -> Any:
        kinds = types.UniTuple(f32, count)
        signature = kinds(kinds, kinds)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(ir_type(f32), [ir_type(f32)] * 2)
            assembly = ir.InlineAsm(function, "add.rn.f32 $0, $1, $2;", "=f,f,f", side_effect=False)
            pairs = [[builder.extract_value(each, number) for each in args] for number in range(count)]
            found = [builder.call(assembly, pair) for pair in pairs]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return add


def store_sums(count: int, pitch: int) -> Any:
    """Make an intrinsic that stores `count` float32 to shared memory, four by four, `pitch` bytes apart."""

    @intrinsic
    def store(context: Any, address: Any, sums: Any) -> Any:
        signature = types.void(u32, types.UniTuple(f32, count))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(ir.VoidType(), [ir_type(u32), *[ir_type(f32)] * 4])
            for first in range(0, count, 4):
                text = f"st.shared.v4.f32 [$0+{first // 4 * pitch}], {{$1,$2,$3,$4}};"
                assembly = ir.InlineAsm(function, text, "r,f,f,f,f,~{memory}", side_effect=True)
                builder.call(assembly, [args[0], *(builder.extract_value(args[1], first + k) for k in range(4))])
            return context.get_dummy_value()

        return signature, codegen

    return store


def load_sums(count: int, pitch: int) -> Any:
    """Make an intrinsic that loads the float32 that `store_sums` stored at a shared address."""
    return _load_floats("shared", u32, 4, [part * pitch for part in range(count // 4)])


def load_row_numbers(rows: int) -> Any:
    """Make an intrinsic that loads a float32 for each of a lane's rows of the second matrix, two of every eight.

    It takes the address of the number of the lane's first row.
    """
    return _load_floats("global", i64, 2, [32 * tile for tile in range(rows // 8)])


def _load_floats(space: str, address_kind: Any, width: int, offsets: Sequence[int]) -> Any:
    """Make an intrinsic that loads `width` float32 at each byte offset from an address in a state space."""
    registers, letter = ",".join(f"${k}" for k in range(width)), "l" if address_kind is i64 else "r"
    constraints = "=f," * width + f"{letter},~{{memory}}"

    @intrinsic
    def load(context: Any, address: Any) -> Any:
        signature = types.UniTuple(f32, width * len(offsets))(address_kind)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds, found = ir.LiteralStructType([ir_type(f32)] * width), []
            function = ir.FunctionType(kinds, [ir_type(address_kind)])
            for offset in offsets:
                text = f"ld.{space}.v{width}.f32 {{{registers}}}, [${width}+{offset}];"
                assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
                loaded = builder.call(assembly, [args[0]])
                found += [builder.extract_value(loaded, k) for k in range(width)]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return load


def store_scaled_half(rows: int, half: int, pitch: int) -> Any:
    """Make an intrinsic that stores like `store_group_half`, with sums times the scale, then times their row's number.

    It takes the numbers of `load_row_numbers(rows)` last.
    """
    product = "mul.rn.f32 t, $3, $2; mul.rn.f32 t, t, $4; add.rn.f32 t, t, $1;"

    @intrinsic
    def store(context: Any, address: Any, scale: Any, extra: Any, sums: Any, numbers: Any) -> Any:
        signature = types.void(i64, f32, f32, types.UniTuple(f32, rows // 2), types.UniTuple(f32, rows // 4))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(ir.VoidType(), [ir_type(i64), *[ir_type(f32)] * 4])
            for tile in range(rows // 8):
                for part in range(2):
                    place = (8 * tile + part) * pitch
                    text = f"{{ .reg .f32 t; {product} st.global.f32 [$0+{place}], t; }}"
                    assembly = ir.InlineAsm(function, text, "l,f,f,f,f,~{memory}", side_effect=True)
                    value = builder.extract_value(args[3], 4 * tile + 2 * half + part)
                    own = builder.extract_value(args[4], 2 * tile + part)
                    builder.call(assembly, [args[0], args[2], args[1], value, own])
            return context.get_dummy_value()

        return signature, codegen

    return store


def store_group_half(rows: int, half: int, pitch: int, *, is_scaled: bool = False) -> Any:
    """Make an intrinsic that stores a lane's sums of one weight row, scaled, plus a number.

    Each sum goes to its row of the output. It takes the global address of the lane's first row (row 2 t, where t is the
    lane's lowest two bits), the scale, the number, and the sums of `multiply_group(rows)`. half: 0 for weight row g, 1
    for g + 8. pitch: bytes from row to row. is_scaled: sums are first multiplied by the scale, and the product is
    rounded; else the scale is ignored.
    """
    product = "mul.rn.f32 t, $3, $2; add.rn.f32 t, t, $1;" if is_scaled else "add.rn.f32 t, $3, $1;"

    @intrinsic
    def store(context: Any, address: Any, scale: Any, extra: Any, sums: Any) -> Any:
        signature = types.void(i64, f32, f32, types.UniTuple(f32, rows // 2))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(ir.VoidType(), [ir_type(i64), *[ir_type(f32)] * 3])
            for tile in range(rows // 8):
                for part in range(2):
                    place = (8 * tile + part) * pitch
                    text = f"{{ .reg .f32 t; {product} st.global.f32 [$0+{place}], t; }}"
                    assembly = ir.InlineAsm(function, text, "l,f,f,f,~{memory}", side_effect=True)
                    value = builder.extract_value(args[3], 4 * tile + 2 * half + part)
                    builder.call(assembly, [args[0], args[2], args[1], value])
            return context.get_dummy_value()

        return signature, codegen

    return store


def take_sums(rows_sums: int, first: int, count: int) -> Any:
    """Make an intrinsic that returns `count` numbers of a tuple of `rows_sums` float32, from place `first` on."""

    @intrinsic
    def take(context: Any, sums: Any) -> Any:
        signature = types.UniTuple(f32, count)(types.UniTuple(f32, rows_sums))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = [builder.extract_value(args[0], first + number) for number in range(count)]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return take
