"""PTX that capability 9.0 brought: bulk copies that count at a barrier, and a warpgroup's `wgmma`.

Four warps are a warpgroup. `multiply_group` is an instruction of 9.0 alone: kernels with it are `specific`. Nothing of
it has a meaning under Numba's simulator.
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

SLICES = 4  # of 16 columns, of a step
# The second matrix in shared memory: rows of 128 bytes, whose pieces of 16 bytes are swizzled; 8 rows are 1024 bytes.
# It is the upper half of a descriptor; the lower one holds the address in units of 16 bytes.
SWIZZLED_128 = 1 << 30 | 1024 >> 4
LOWER = 1 << 16  # a stride that this layout does not use
SLICE_UNITS = 2  # from a slice of 16 columns to the next

# what was done to barriers before it is seen by copies that are issued after it
fence_barriers = instruction("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", None, ())
# an arrival that lets the phase wait for so many bytes more
barrier_expect = instruction("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [$0], $1; }", None, (u32, u32))
# from global to shared memory: address there, source, bytes, the barrier that counts them; all multiples of 16
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
copy_bulk = instruction(f"{_BULK} [$0], [$1], $2, [$3];", None, (u32, i64, u32, u32))
# and with one of these policies of the L2: what is read once is evicted first (its number as in `ptx`)
copy_bulk_hinted = instruction(f"{_BULK}.L2::cache_hint [$0], [$1], $2, [$3], $4;", None, (u32, i64, u32, u32, i64))
# to the same place of both blocks of a cluster of two, each of whose barriers at the same place counts the bytes
copy_bulk_to_pair = instruction(
    f"{{ .reg .b16 m; mov.b16 m, 3; {_BULK}.multicast::cluster [$0], [$1], $2, [$3], m; }}", None, (u32, i64, u32, u32)
)
# a block's place in its cluster
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", u32, (), pure=True)
# all threads of a cluster's blocks have come by; of memory it orders nothing
sync_cluster = instruction("barrier.cluster.arrive.relaxed; barrier.cluster.wait;", None, (), together=True)
# at the barrier at this address of the block with this place in the cluster. It publishes no writes to that block,
# which would take a fence of all memory: it tells that reads are over, whose values have been used
barrier_arrive_at = instruction(
    "{ .reg .b32 t; mapa.shared::cluster.u32 t, $0, $1; mbarrier.arrive.shared::cluster.b64 _, [t]; }",
    None,
    (u32, u32),
)
KEPT_AS_USUAL, READ_ONCE = 0x1000000000000000, 0x12F0000000000000


def give_registers(kept: int) -> Any:
    """An intrinsic of a warpgroup: keep so many registers a thread, a multiple of 8, and leave the others to others."""
    return instruction(f"setmaxnreg.dec.sync.aligned.u32 {kept};", None, (), together=True)


def take_registers(wanted: int) -> Any:
    """An intrinsic of a warpgroup: wait until others have left it so many registers a thread, a multiple of 8."""
    return instruction(f"setmaxnreg.inc.sync.aligned.u32 {wanted};", None, (), together=True)


def multiply_group(rows: int, slices: int = SLICES, *, by_codes: bool = False) -> Any:
    """An intrinsic of a warpgroup: let 64 weight rows be multiplied by `rows` rows of the second matrix.

    slices: of 16 columns; all are a step. by_codes: of 32 columns, and both matrices are e4m3 codes in place of bf16,
    whose sums the tensor cores keep with some 13 bits after the point of the largest of what they add.
    It takes the sums, float32; a lane's words of the weights, two a slice: of all columns for row g, then
    for row g + 8, g a quarter of the lane; the shared address of the second matrix; and a number: zero where the sums
    begin again. The accumulators that it returns hold sums when `await_group` has had them; until then nothing else
    may.
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
    """Slices of 16 columns, or 32 of codes, begun after each other, to be awaited together."""
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
    """An intrinsic of a warpgroup: wait for all `wgmma` under way, but so many that began last.

    words: that `multiply_group` took. The sums go through it, and the words of what was waited for go in: until then
    nothing may be written where they stand.
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
    """An intrinsic: the second of two tuples of words, where a number is not zero, as it never is.

    To the assembler a `wgmma` has done with its words when it has begun, and it loads others where they stand: so they
    are used once more here, after the wait for it.
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
    """An intrinsic: store the words of a product of so many slices where a number is not zero, as it never is.

    After the wait for the product it keeps its words where they stand until then. And the words of a product that is
    awaited in the next turn of a loop are in registers that the loop begins with: to the assembler they otherwise come
    from anywhere, and it reserves registers for those of each loop in all others.
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
    """An intrinsic: two tuples of `count` float32, added one by one, each sum rounded by itself."""

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
    """An intrinsic: store `count` float32, four by four, `pitch` bytes apart, from a shared address on."""

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
    """An intrinsic: the float32 that `store_sums` stored at a shared address."""
    return _load_floats("shared", u32, 4, [part * pitch for part in range(count // 4)])


def load_row_numbers(rows: int) -> Any:
    """An intrinsic: the float32 of a lane's rows of the second matrix, two of every eight, from that of its first."""
    return _load_floats("global", i64, 2, [32 * tile for tile in range(rows // 8)])


def _load_floats(space: str, address_kind: Any, width: int, offsets: Sequence[int]) -> Any:
    """An intrinsic: `width` float32 at each offset, in bytes, from an address in a state space."""
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
    """An intrinsic: as `store_group_half`, of sums times the scale and then times the number of their row.

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
    """An intrinsic: a lane's sums of one weight row, scaled, plus a number, each to the place of its row of the output.

    It takes the global address of the lane's first row (of t * 2, t the lane's lowest two bits), the scale, the
    number, and the sums of `multiply_group(rows)`. half: 0 for weight row g, 1 for g + 8. pitch: bytes from row to row.
    is_scaled: sums are multiplied by the scale, and the product rounded, first; else it is passed over.
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
    """An intrinsic: `count` of a tuple of so many float32, from the first on."""

    @intrinsic
    def take(context: Any, sums: Any) -> Any:
        signature = types.UniTuple(f32, count)(types.UniTuple(f32, rows_sums))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = [builder.extract_value(args[0], first + number) for number in range(count)]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return take
