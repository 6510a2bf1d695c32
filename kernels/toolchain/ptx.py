"""This module has the PTX instructions that kernels call by name, as functions of Numba kernels.

Addresses are int64 (global) or uint32 (shared). A bf16 value is passed as its bits. Under Numba's simulator the few
instructions that integer kernels use have Python meanings (`simulated_ptx`), and the others are absent.
"""

from typing import Any

from llvmlite import ir

from lowlat.kernels.toolchain.numba_cuda import SIMULATED, cuda, intrinsic, types

__all__ = [
    "add_rn", "and_or", "array_address", "atomic_add_gpu", "ballot", "barrier_arrive", "barrier_init",
    "barrier_is_over", "barrier_is_over_soon", "bf16_bits", "bf16_pair", "bits_of_float", "both_high", "both_low",
    "copies_commit",
    "copies_wait", "copy_async_4", "copy_async_16", "copy_async_16_if", "copy_async_16_once", "copy_async_16_once_if",
    "copy_async_16_or_zero", "count_bits", "div_rn", "e4m3_pair", "e4m3_to_f16", "exp2_approx", "exp2_approx_ftz",
    "f16_pair", "fence_system", "float_of_bits", "fma_bf16_pair", "fma_rn", "fma_tiles", "instruction",
    "interleave_codes", "ir_type", "kept", "kept_long",
    "lanes_of_same", "let_next_kernel_start", "load_acquire_gpu", "load_acquire_system", "load_ahead_128",
    "load_global_64", "load_global_128", "load_global_bf16", "load_global_f32", "load_global_i32", "load_global_i64",
    "load_global_nc_128", "load_global_u8", "load_global_u16", "load_relaxed_gpu_128", "load_relaxed_gpu_f32",
    "load_relaxed_system_word", "load_relaxed_system_words", "load_shared_128", "load_shared_f32",
    "load_shared_matrix_x4_transposed", "load_shared_tiles", "load_shared_u32", "load_volatile_i32",
    "load_volatile_i64", "max_bf16_pair", "mma_bf16", "mma_bf16_tiles", "mma_f16", "mul_rn", "mul_wide", "pick_bytes",
    "rcp_approx",
    "rcp_approx_ftz", "select_bits", "set_graph_condition", "shared_address", "stay_here", "store_global_64",
    "store_global_128",
    "store_global_f32", "store_global_i32", "store_global_i64", "store_global_u8", "store_global_u16",
    "store_global_u16_if", "store_global_u32", "store_relaxed_gpu_f32", "store_relaxed_gpu_u16",
    "store_relaxed_system_word", "store_relaxed_system_words", "store_release_system", "store_shared_64",
    "store_shared_128", "store_shared_f32", "store_shared_tiles", "store_shared_u32", "swap_middle_bytes",
    "sync_one_warp", "sync_two_warps", "sync_warp",
    "trap", "varying", "varying_long", "wait_for_previous_kernel", "warp_max", "warp_sum",
    "xor_and", "zeros",
]  # fmt: skip

i32, i64, u16, u32, u64, f32 = types.int32, types.int64, types.uint16, types.uint32, types.uint64, types.float32
_IR = {
    i32: ir.IntType(32),
    u32: ir.IntType(32),
    u16: ir.IntType(16),
    i64: ir.IntType(64),
    u64: ir.IntType(64),
    f32: ir.FloatType(),
}
_LETTER = {i32: "r", u32: "r", u16: "h", i64: "l", u64: "l", f32: "f"}


def ir_type(kind: Any) -> Any:
    """Return LLVM's type for a numeric type of Numba."""
    return _IR[kind]


def instruction(
    text: str, returns: Any, arguments: tuple[Any, ...], *, pure: bool = False, together: bool = False
) -> Any:
    """Make an intrinsic of one statement of PTX.

    text      operands are $0, $1, ..: results first, then arguments
    returns   a type, a tuple of equal types as (type, count), or None
    pure      it has no effect and reads no memory, so the compiler may move and merge it
    together  all lanes of a warp execute it at once, so the compiler may not copy it into branches
    """
    kind, count = returns if isinstance(returns, tuple) else (returns, 0 if returns is None else 1)
    result = types.void if count == 0 else kind if count == 1 else types.UniTuple(kind, count)
    signature = result(*arguments)
    outputs = [f"={_LETTER[kind]}"] * count if count else []
    constraints = ",".join([*outputs, *(_LETTER[a] for a in arguments), *([] if pure else ["~{memory}"])])
    values = [_IR[a] for a in arguments]
    returned = ir.VoidType() if count == 0 else _IR[kind] if count == 1 else ir.LiteralStructType([_IR[kind]] * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(returned, values)
        attributes = ("convergent",) if together else ()
        call = builder.call(ir.InlineAsm(function, text, constraints, side_effect=not pure), args, attrs=attributes)
        if count == 0:
            return context.get_dummy_value()
        if count == 1:
            return call
        parts = [builder.extract_value(call, k) for k in range(count)]
        return context.make_tuple(builder, signature.return_type, parts)

    return _typed(signature, codegen, len(arguments))


def _typed(signature: Any, codegen: Any, count: int) -> Any:
    """Make the typed intrinsic. Numba wants a function with exactly as many parameters as the intrinsic has."""
    if count == 0:
        return intrinsic(lambda context: (signature, codegen))
    if count == 1:
        return intrinsic(lambda context, a: (signature, codegen))
    if count == 2:
        return intrinsic(lambda context, a, b: (signature, codegen))
    if count == 3:
        return intrinsic(lambda context, a, b, c: (signature, codegen))
    if count == 4:
        return intrinsic(lambda context, a, b, c, d: (signature, codegen))
    if count == 5:
        return intrinsic(lambda context, a, b, c, d, e: (signature, codegen))
    if count == 10:
        return intrinsic(lambda context, a, b, c, d, e, f, g, h, i, j: (signature, codegen))
    raise ValueError(f"no intrinsic of {count} arguments")


# Programmatic dependent launch (PDL): a kernel may start before the previous one ends. It must wait before it reads or
# writes anything that the previous one may use.
wait_for_previous_kernel = instruction("griddepcontrol.wait;", None, ())
let_next_kernel_start = instruction("griddepcontrol.launch_dependents;", None, ())

# Global memory. PTX's memory model decides which load is right:
#   After wait_for_previous_kernel: plain loads, for data that any earlier kernel wrote. griddepcontrol.wait makes all
#     writes of the previous kernel visible, and that kernel has itself waited so. To bypass L1 is then only a hint.
#   Before it: nc loads, which stay out of L1, for data that no kernel of the step writes (weights). If a builder knows
#     that slots' lengths and tables are older than the previous kernel (`early_metadata`), nc loads read those, too:
#     the previous kernel let this one start only after it had itself waited for the kernel that wrote them.
#     The assembler moves nc loads down past the wait if no branch is between. It does not move `load_ahead_128`.
#   For data that blocks of this launch, or of the previous one, write meanwhile: the relaxed loads below.
load_global_nc_128 = instruction("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, 4), (i64,))
load_ahead_128 = instruction("ld.global.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, 4), (i64,))
load_global_128 = instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, 4), (i64,))
load_global_64 = instruction("ld.global.v2.u32 {$0,$1}, [$2];", (u32, 2), (i64,))
load_global_f32 = instruction("ld.global.f32 $0, [$1];", f32, (i64,))
load_global_i32 = instruction("ld.global.s32 $0, [$1];", i32, (i64,))
load_global_i64 = instruction("ld.global.s64 $0, [$1];", i64, (i64,))
load_global_u8 = instruction("{ .reg .u16 t; ld.global.u8 t, [$1]; cvt.u32.u16 $0, t; }", u32, (i64,))
load_global_u16 = instruction("{ .reg .u16 t; ld.global.u16 t, [$1]; cvt.u32.u16 $0, t; }", u32, (i64,))
load_global_bf16 = instruction(
    "{ .reg .u16 t; .reg .u32 u; ld.global.u16 t, [$1]; cvt.u32.u16 u, t; shl.b32 u, u, 16; mov.b32 $0, u; }",
    f32,
    (i64,),
)
load_volatile_i32 = instruction("ld.volatile.global.s32 $0, [$1];", i32, (i64,))
load_volatile_i64 = instruction("ld.volatile.global.s64 $0, [$1];", i64, (i64,))
store_global_128 = instruction("st.global.v4.u32 [$0], {$1,$2,$3,$4};", None, (i64, u32, u32, u32, u32))
store_global_64 = instruction("st.global.v2.u32 [$0], {$1,$2};", None, (i64, u32, u32))
store_global_f32 = instruction("st.global.f32 [$0], $1;", None, (i64, f32))
store_global_i32 = instruction("st.global.s32 [$0], $1;", None, (i64, i32))
store_global_i64 = instruction("st.global.s64 [$0], $1;", None, (i64, i64))
store_global_u8 = instruction("{ .reg .u16 t; cvt.u16.u32 t, $1; st.global.u8 [$0], t; }", None, (i64, u32))
store_global_u32 = instruction("st.global.u32 [$0], $1;", None, (i64, u32))
store_global_u16 = instruction("{ .reg .u16 t; cvt.u16.u32 t, $1; st.global.u16 [$0], t; }", None, (i64, u32))
# It stores if the last number is not zero, without a branch, so that the computations of several such stores overlap.
store_global_u16_if = instruction(
    "{ .reg .u16 t; .reg .pred p; setp.ne.u32 p, $2, 0; cvt.u16.u32 t, $1; @p st.global.u16 [$0], t; }",
    None,
    (i64, u32, u32),
)

# shared memory
load_shared_128 = instruction("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, 4), (u32,))
load_shared_u32 = instruction("ld.shared.u32 $0, [$1];", u32, (u32,))
load_shared_f32 = instruction("ld.shared.f32 $0, [$1];", f32, (u32,))
store_shared_128 = instruction("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", None, (u32, u32, u32, u32, u32))
store_shared_64 = instruction("st.shared.v2.u32 [$0], {$1,$2};", None, (u32, u32, u32))
store_shared_f32 = instruction("st.shared.f32 [$0], $1;", None, (u32, f32))
store_shared_u32 = instruction("st.shared.u32 [$0], $1;", None, (u32, u32))
load_shared_matrix_x4_transposed = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", (u32, 4), (u32,), together=True
)

# asynchronous copies from global to shared memory, of 16 bytes, bypassing L1; the second writes zeros if bytes is 0
copy_async_16 = instruction("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", None, (u32, i64))
copy_async_16_or_zero = instruction("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", None, (u32, i64, u32))
# The L2 evicts data first that a step reads once, so that code and rows, which are read again, stay there. The policy's
# number is the result of createpolicy.fractional.L2::evict_first with 1.0 on 8.0, 9.0, 10.0 and 12.0, read from their
# machine code. To create it at every copy would cost five instructions.
_ONCE = "{ .reg .b64 policy; mov.b64 policy, 0x12F0000000000000; "
copy_async_16_once = instruction(
    _ONCE + "cp.async.cg.shared.global.L2::cache_hint.L2::128B [$0], [$1], 16, policy; }", None, (u32, i64)
)
# the same copies, only in lanes whose number is not zero, without a branch
copy_async_16_if = instruction(
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.cg.shared.global.L2::128B [$0], [$1], 16; }",
    None,
    (u32, i64, u32),
)
copy_async_16_once_if = instruction(
    _ONCE
    + ".reg .pred p; setp.ne.u32 p, $2, 0; "
    + "@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [$0], [$1], 16, policy; }",
    None,
    (u32, i64, u32),
)
# They return the same address, but the assembler cannot know that it is the same in all lanes. This avoids two of its
# errors (nvJitLink 13.0, 9.0). 1. An address that is the same in all lanes may be copied by a uniform register; with
# a hint for the L2 that becomes an illegal instruction. 2. If a number is increased and then scaled to an address, the
# increase may be added twice: it moves into the address's offset, and the increased number is still used.
varying = instruction("{ .reg .u32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, $1, t; }", u32, (u32,))
varying_long = instruction(
    "{ .reg .u32 t; .reg .u64 w; mov.u32 t, %laneid; shr.u32 t, t, 5; cvt.u64.u32 w, t; add.u64 $0, $1, w; }",
    i64,
    (i64,),
)
# They return the same number, and the assembler keeps it in a register. It may compute sums and products again at each
# use, in loops, too, but not a value that comes from a lane.
kept = instruction(
    "{ .reg .u32 t; mov.u32 t, %laneid; shfl.sync.idx.b32 $0, $1, t, 31, 0xffffffff; }", u32, (u32,), together=True
)
kept_long = instruction(
    "{ .reg .u32 t, a, b; mov.u32 t, %laneid; mov.b64 {a, b}, $1; shfl.sync.idx.b32 a, a, t, 31, 0xffffffff; "
    + "shfl.sync.idx.b32 b, b, t, 31, 0xffffffff; mov.b64 $0, {a, b}; }",
    i64,
    (i64,),
    together=True,
)
# 4 bytes through L1, for memory that is not aligned to 16 bytes
copy_async_4 = instruction("cp.async.ca.shared.global [$0], [$1], 4;", None, (u32, i64))
copies_commit = instruction("cp.async.commit_group;", None, ())


# Barriers in shared memory (mbarrier), 8 bytes each: a phase ends after the number of arrivals that `init` set.
# A wait names the parity of its phase; at a new barrier phase 1 counts as over.
barrier_init = instruction("mbarrier.init.shared.b64 [$0], $1;", None, (u32, u32))
barrier_arrive = instruction("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [$0]; }", None, (u32,))
barrier_is_over = instruction(
    "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }", u32, (u32, u32)
)
# from 9.0 on; the warp sleeps a while before the answer is no
barrier_is_over_soon = instruction(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }", u32, (u32, u32)
)
# among the lanes of a warp
sync_warp = instruction("bar.warp.sync 0xffffffff;", None, (), together=True)
sync_two_warps = instruction("bar.sync $0, 64;", None, (u32,), together=True)  # by the number of a block's barrier
# It synchronises one warp by a barrier of the block. If lanes may have diverged, as far as the assembler knows, it
# duplicates long code around `sync_warp`, and has fewer registers for each copy.
sync_one_warp = instruction("bar.sync $0, 32;", None, (u32,), together=True)
ballot = instruction(
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", u32, (u32,), together=True
)
lanes_of_same = instruction("match.any.sync.b32 $0, $1, 0xffffffff;", u32, (u32,), together=True)
count_bits = instruction("popc.b32 $0, $1;", u32, (u32,), pure=True)


def copies_wait(pending: int) -> Any:
    """Make an intrinsic that waits until at most `pending` groups of copies are in flight. Call it outside a kernel."""
    return instruction(f"cp.async.wait_group {pending};", None, ())


# arithmetic with explicit rounding, which the compiler may not contract
mul_rn = instruction("mul.rn.f32 $0, $1, $2;", f32, (f32, f32), pure=True)
add_rn = instruction("add.rn.f32 $0, $1, $2;", f32, (f32, f32), pure=True)
div_rn = instruction("div.rn.f32 $0, $1, $2;", f32, (f32, f32), pure=True)
fma_rn = instruction("fma.rn.f32 $0, $1, $2, $3;", f32, (f32, f32, f32), pure=True)
rcp_approx = instruction("rcp.approx.f32 $0, $1;", f32, (f32,), pure=True)
rcp_approx_ftz = instruction("rcp.approx.ftz.f32 $0, $1;", f32, (f32,), pure=True)  # above 2**126: 0
exp2_approx = instruction("ex2.approx.f32 $0, $1;", f32, (f32,), pure=True)
exp2_approx_ftz = instruction("ex2.approx.ftz.f32 $0, $1;", f32, (f32,), pure=True)  # below 2**-126: 0
bf16_bits = instruction("{ .reg .b16 t; cvt.rn.bf16.f32 t, $1; cvt.u32.u16 $0, t; }", u32, (f32,), pure=True)
# (a & b) | c in one instruction; the assembler does not find it by itself if two of the operands are constants
and_or = instruction("lop3.b32 $0, $1, $2, $3, 0xEA;", u32, (u32, u32, u32), pure=True)
# It picks four bytes of a word by the selector's four digits: 0 to 3 for a byte of the word, 4 for a zero.
pick_bytes = instruction("prmt.b32 $0, $1, 0, $2;", u32, (u32, u32), pure=True)
# They return a pair with the low half of a word twice, or the high half. As operands of a product they cost nothing.
both_low = instruction("{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l}; }", u32, (u32,), pure=True)
both_high = instruction("{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h}; }", u32, (u32,), pure=True)
# the 64-bit product of two words, as its lower and its upper word
mul_wide = instruction("{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$0, $1}, t; }", (u32, 2), (u32, u32), pure=True)
# (a ^ b) & c in one instruction
xor_and = instruction("lop3.b32 $0, $1, $2, $3, 0x28;", u32, (u32, u32, u32), pure=True)
fma_bf16_pair = instruction("fma.rn.bf16x2 $0, $1, $2, $3;", u32, (u32, u32, u32), pure=True)
bf16_pair = instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", u32, (f32, f32), pure=True)  # the first in the low half
f16_pair = instruction("cvt.rn.f16x2.f32 $0, $2, $1;", u32, (f32, f32), pure=True)  # the first in the low half
max_bf16_pair = instruction("max.bf16x2 $0, $1, $2;", u32, (u32, u32), pure=True)
# It converts a word of four e4m3 codes to two pairs of fp16: of bytes 0 and 1, and of bytes 2 and 3; from 8.9 on.
e4m3_to_f16 = instruction(
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
    (u32, 2),
    (u32,),
    pure=True,
)
# It converts two float32 to e4m3 codes, the first in the low byte: rounded to nearest, ties to even, at most 448; from
# 8.9 on.
e4m3_pair = instruction(
    "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }", u32, (f32, f32), pure=True
)
# It interleaves two such pairs: the second's low byte, the first's low byte, the second's high byte, the first's.
interleave_codes = instruction("prmt.b32 $0, $1, $2, 0x1504;", u32, (u32, u32), pure=True)
# bits of b where the mask is 1, else of a, in one instruction
select_bits = instruction("lop3.b32 $0, $1, $2, $3, 0xD8;", u32, (u32, u32, u32), pure=True)
swap_middle_bytes = instruction("prmt.b32 $0, $1, 0, 0x3120;", u32, (u32,), pure=True)
float_of_bits = instruction("mov.b32 $0, $1;", f32, (u32,), pure=True)
bits_of_float = instruction("mov.b32 $0, $1;", u32, (f32,), pure=True)
# It returns the same number, but the compiler cannot move it: so results computed from it are not moved out of a loop,
# where they would occupy registers.
stay_here = instruction("mov.b32 $0, $1;", i32, (i32,))
# reductions over all 32 lanes of a warp; each lane gets the result
warp_max = instruction("redux.sync.max.u32 $0, $1, 0xffffffff;", u32, (u32,), together=True)
warp_sum = instruction("redux.sync.add.u32 $0, $1, 0xffffffff;", u32, (u32,), together=True)
# D = A B + C for one warp: A 16x16 bf16 row-major, B 16x8 bf16 column-major, C and D 16x8 float32
MMA_BF16 = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
)
_MMA_OPERANDS = (f32, f32, f32, f32, u32, u32, u32, u32, u32, u32)
mma_bf16 = instruction(MMA_BF16, (f32, 4), _MMA_OPERANDS, pure=True, together=True)
mma_f16 = instruction(MMA_BF16.replace("bf16", "f16"), (f32, 4), _MMA_OPERANDS, pure=True, together=True)


def load_shared_tiles(count: int, stride: int) -> Any:
    """Make an intrinsic that loads 16 bytes at each of `count` shared addresses, `stride` bytes apart.

    It returns a tuple of 4 * count words.
    """

    @intrinsic
    def load(context: Any, address: Any) -> Any:
        signature = types.UniTuple(u32, 4 * count)(u32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = []
            struct = ir.LiteralStructType([_IR[u32]] * 4)
            for tile in range(count):
                text = f"ld.shared.v4.u32 {{$0,$1,$2,$3}}, [$4+{tile * stride}];"
                function = ir.FunctionType(struct, [_IR[u32]])
                assembly = ir.InlineAsm(function, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
                call = builder.call(assembly, args)
                words += [builder.extract_value(call, k) for k in range(4)]
            return context.make_tuple(builder, signature.return_type, words)

        return signature, codegen

    return load


def mma_bf16_tiles(total: int, first: int, count: int, word: int) -> Any:
    """Make an intrinsic that multiplies one A fragment by `count` B fragments and adds to accumulators.

    B's fragments are words `word` and `word + 1` of each tile's four. It takes the accumulators, a tuple of 4 * total
    float32, the four words of A and the tuple of B's words. It returns the accumulators, with tiles `first` to
    `first + count - 1` updated.
    """

    @intrinsic
    def multiply(context: Any, accumulators: Any, a0: Any, a1: Any, a2: Any, a3: Any, words: Any) -> Any:
        kinds = types.UniTuple(f32, 4 * total)
        signature = kinds(kinds, u32, u32, u32, u32, types.UniTuple(u32, 4 * count))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operands = [_IR[f32]] * 4 + [_IR[u32]] * 6
            function = ir.FunctionType(ir.LiteralStructType([_IR[f32]] * 4), operands)
            constraints = "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r"
            assembly = ir.InlineAsm(function, MMA_BF16, constraints, side_effect=False)
            results = [builder.extract_value(args[0], k) for k in range(4 * total)]
            for tile in range(count):
                at = 4 * (first + tile)
                column = [builder.extract_value(args[5], 4 * tile + word + k) for k in range(2)]
                call = builder.call(assembly, [*results[at : at + 4], *args[1:5], *column], attrs=("convergent",))
                results[at : at + 4] = [builder.extract_value(call, k) for k in range(4)]
            return context.make_tuple(builder, signature.return_type, results)

        return signature, codegen

    return multiply


def fma_tiles(total: int, first: int, count: int, wanted: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """Make an intrinsic that adds `count` tiles of scaled sums to accumulators, from tile `first` on.

    The accumulators are 4 * total float32. A tile's first two sums belong to one row, the other two to the row 8 below.
    Each of the two rows has its scale.
    wanted: which of a tile's four sums are added; the accumulators of the others stay.
    """

    @intrinsic
    def add(context: Any, accumulators: Any, sums: Any, top: Any, low: Any) -> Any:
        kinds = types.UniTuple(f32, 4 * total)
        signature = kinds(kinds, types.UniTuple(f32, 4 * count), f32, f32)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(_IR[f32], [_IR[f32]] * 3)
            assembly = ir.InlineAsm(function, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", side_effect=False)
            results = [builder.extract_value(args[0], k) for k in range(4 * total)]
            for place in (4 * tile + part for tile in range(count) for part in wanted):
                scale = args[2] if place % 4 < 2 else args[3]
                at = 4 * first + place
                results[at] = builder.call(assembly, [builder.extract_value(args[1], place), scale, results[at]])
            return context.make_tuple(builder, signature.return_type, results)

        return signature, codegen

    return add


def store_shared_tiles(total: int, first: int, count: int, offsets: tuple[int, int, int, int], stride: int) -> Any:
    """Make an intrinsic that stores tiles `first` to `first + count - 1` of `total` to shared memory.

    offsets  in bytes, of a tile's four float32
    stride   in bytes, from a tile to the next
    """

    @intrinsic
    def store(context: Any, address: Any, accumulators: Any) -> Any:
        signature = types.void(u32, types.UniTuple(f32, 4 * total))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(ir.VoidType(), [_IR[u32], _IR[f32]])
            for tile in range(count):
                for part, offset in enumerate(offsets):
                    text = f"st.shared.f32 [$0+{tile * stride + offset}], $1;"
                    assembly = ir.InlineAsm(function, text, "r,f,~{memory}", side_effect=True)
                    builder.call(assembly, [args[0], builder.extract_value(args[1], 4 * (first + tile) + part)])
            return context.get_dummy_value()

        return signature, codegen

    return store


def zeros(count: int) -> Any:
    """Make an intrinsic that returns a tuple of `count` float32 zeros."""

    @intrinsic
    def make(context: Any) -> Any:
        signature = types.UniTuple(f32, count)()

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return context.make_tuple(builder, signature.return_type, [ir.Constant(_IR[f32], 0.0)] * count)

        return signature, codegen

    return make


# memory order between blocks, and with the host
atomic_add_gpu = instruction("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", u32, (i64, u32))
load_acquire_gpu = instruction("ld.acquire.gpu.global.u32 $0, [$1];", u32, (i64,))
load_acquire_system = instruction("ld.acquire.sys.global.s64 $0, [$1];", i64, (i64,))
# It bypasses L1, too, but later loads need not wait for it.
load_relaxed_gpu_f32 = instruction("ld.relaxed.gpu.global.f32 $0, [$1];", f32, (i64,))
load_relaxed_gpu_128 = instruction("ld.relaxed.gpu.global.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, 4), (i64,))
store_relaxed_gpu_f32 = instruction("st.relaxed.gpu.global.f32 [$0], $1;", None, (i64, f32))
store_relaxed_gpu_u16 = instruction(
    "{ .reg .u16 t; cvt.u16.u32 t, $1; st.relaxed.gpu.global.u16 [$0], t; }", None, (i64, u32)
)
store_release_system = instruction("st.release.sys.global.s64 [$0], $1;", None, (i64, i64))
# One or two words of eight bytes, each a number and its epoch. A reader always sees a whole word.
load_relaxed_system_word = instruction(
    "{ .reg .b64 s; ld.relaxed.sys.global.b64 s, [$2]; mov.b64 {$0,$1}, s; }", (u32, 2), (i64,)
)
store_relaxed_system_word = instruction(
    "{ .reg .b64 s; mov.b64 s, {$1,$2}; st.relaxed.sys.global.b64 [$0], s; }", None, (i64, u32, u32)
)
load_relaxed_system_words = instruction(
    "{ .reg .b64 s, t; ld.relaxed.sys.global.v2.b64 {s,t}, [$4]; mov.b64 {$0,$1}, s; mov.b64 {$2,$3}, t; }",
    (u32, 4),
    (i64,),
)
store_relaxed_system_words = instruction(
    "{ .reg .b64 s, t; mov.b64 s, {$1,$3}; mov.b64 t, {$2,$3}; st.relaxed.sys.global.v2.b64 [$0], {s,t}; }",
    None,
    (i64, u32, u32, u32),
)
fence_system = instruction("fence.acq_rel.sys;", None, ())

# It ends the launch with an error.
trap = instruction("trap;", None, ())


@intrinsic
def shared_address(context: Any, array: Any) -> Any:
    """Return the 32-bit address of an array in shared memory."""
    signature = u32(array)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        function = ir.FunctionType(_IR[u32], [_IR[i64]])
        return builder.call(ir.InlineAsm(function, text, "=r,l"), [builder.ptrtoint(data, _IR[i64])])

    return signature, codegen


@intrinsic
def array_address(context: Any, array: Any) -> Any:
    """Return the global address of an array's first element."""
    signature = i64(array)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _IR[i64])

    return signature, codegen


# The driver resolves it when it loads the PTX, so kernels that call it are not linked ahead (`Kernel.linked`).
set_graph_condition: Any = (
    None if SIMULATED else cuda.declare_device("cudaGraphSetConditional", "void(uint64,uint32)", abi="c")
)

if SIMULATED:
    from lowlat.kernels.toolchain.simulated_ptx import *  # noqa: F403
