"""This module lets a Python function write long runs of a warp's instructions: loops over registers are unrolled.

Such a function takes an `Instructions` first, then its arguments, with tuples as lists. Its values are the results of
instructions. So the same lines write PTX here, and compute with numbers when tests walk kernels. Offsets are constant
bytes. Numba's simulator has none of these.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from lowlat.kernels.toolchain.numba_cuda import intrinsic, types
from lowlat.kernels.toolchain.ptx import MMA_BF16, f32, i64, ir_type, u32

__all__ = ["Instructions", "unrolled"]

_LETTER = {f32: "f", u32: "r", i64: "l"}
_HIGH = 0xFFFF0000


class Instructions:
    """The instructions of one call; the methods take and return LLVM's values. Floats are float32, words 32 bits."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def number(self, value: float) -> Any:
        return ir.Constant(ir_type(f32), value)

    def load_64(self, address: Any, offset: int) -> list[Any]:
        """Two words of shared memory."""
        return self._several(f"ld.shared.v2.u32 {{$0,$1}}, [$2+{offset}];", (u32, 2), [(u32, address)])

    def load_128(self, address: Any, offset: int) -> list[Any]:
        """Four words of shared memory."""
        return self._several(f"ld.shared.v4.u32 {{$0,$1,$2,$3}}, [$4+{offset}];", (u32, 4), [(u32, address)])

    def load_float(self, address: Any, offset: int) -> Any:
        """A float of shared memory."""
        return self._one(f"ld.shared.f32 $0, [$1+{offset}];", f32, [(u32, address)])

    def store_float(self, address: Any, offset: int, value: Any) -> None:
        """A float to shared memory."""
        self._none(f"st.shared.f32 [$0+{offset}], $1;", [(u32, address), (f32, value)])

    def load_global_two_if(self, address: Any, offset: int, wanted: Any) -> list[Any]:
        """Two floats of global memory, or zeros where a word is 0."""
        text = (
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; "
            f"@p ld.global.v2.f32 {{$0,$1}}, [$2+{offset}]; }}"
        )
        return self._several(text, (f32, 2), [(i64, address), (u32, wanted)])

    def store_global_two(self, address: Any, offset: int, first: Any, second: Any) -> None:
        """Two floats to global memory."""
        self._none(f"st.global.v2.f32 [$0+{offset}], {{$1,$2}};", [(i64, address), (f32, first), (f32, second)])

    def store_global_four(self, address: Any, offset: int, words: Sequence[Any]) -> None:
        """Four words to global memory."""
        text = f"st.global.v4.u32 [$0+{offset}], {{$1,$2,$3,$4}};"
        self._none(text, [(i64, address), *((u32, word) for word in words)])

    def store_global_below(self, address: Any, offset: int, word: Any, index: Any, limit: Any) -> None:
        """A word to global memory where an index is below a limit, both unsigned."""
        text = f"{{ .reg .pred p; setp.lt.u32 p, $2, $3; @p st.global.u32 [$0+{offset}], $1; }}"
        self._none(text, [(i64, address), (u32, word), (u32, index), (u32, limit)])

    def matrices(self, address: Any, offset: int, *, transposed: bool = False) -> list[Any]:
        """Four 8 x 8 matrices of 16 bits: lane i has the address of row i % 8 of matrix i / 8."""
        form = ".trans" if transposed else ""
        text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
        return self._several(text, (u32, 4), [(u32, address)], together=True)

    def transposed(self, word: Any) -> Any:
        """An 8 x 8 matrix of 16 bits in the registers of a warp, transposed."""
        return self._one("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", u32, [(u32, word)], together=True, pure=True)

    def mma(self, sums: Sequence[Any], first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        """mma.m16n8k16 of bf16: 4 sums, 4 words of the first matrix, 2 of the second."""
        given = [*((f32, each) for each in sums), *((u32, each) for each in (*first, *second))]
        return self._several(MMA_BF16, (f32, 4), given, together=True, pure=True)

    def mul(self, a: Any, b: Any) -> Any:
        return self._one("mul.rn.f32 $0, $1, $2;", f32, [(f32, a), (f32, b)], pure=True)

    def sub(self, a: Any, b: Any) -> Any:
        return self._one("sub.rn.f32 $0, $1, $2;", f32, [(f32, a), (f32, b)], pure=True)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._one("fma.rn.f32 $0, $1, $2, $3;", f32, [(f32, a), (f32, b), (f32, c)], pure=True)

    def negated(self, value: Any) -> Any:
        return self._one("neg.f32 $0, $1;", f32, [(f32, value)], pure=True)

    def pair(self, low: Any, high: Any) -> Any:
        """Two floats rounded to bf16, in one word."""
        return self._one("cvt.rn.bf16x2.f32 $0, $2, $1;", u32, [(f32, low), (f32, high)], pure=True)

    def low(self, word: Any) -> Any:
        """The lower bf16 of a word, as a float."""
        return self.float_of(self._builder.shl(word, ir.Constant(ir_type(u32), 16)))

    def high(self, word: Any) -> Any:
        """The upper bf16 of a word, as a float."""
        return self.float_of(self._builder.and_(word, ir.Constant(ir_type(u32), _HIGH)))

    def float_of(self, word: Any) -> Any:
        """The float with these bits."""
        return self._builder.bitcast(word, ir_type(f32))

    def plus(self, word: Any, count: int) -> Any:
        """A word and a constant, modulo 2**32."""
        return self._builder.add(word, ir.Constant(ir_type(u32), count & 0xFFFFFFFF))

    def below(self, word: Any, limit: int) -> Any:
        """Whether a word is below a constant, unsigned."""
        return self._builder.icmp_unsigned("<", word, ir.Constant(ir_type(u32), limit))

    def select(self, condition: Any, value: Any, other: Any) -> Any:
        """The first float where the condition holds, else the other."""
        return self._builder.select(condition, value, other)

    def sync(self, barrier: Any) -> None:
        """A barrier of the warp's lanes, by a barrier of the block, see `ptx.sync_one_warp`."""
        self._none("bar.sync $0, 32;", [(u32, barrier)], together=True)

    def _call(self, text: str, returned: Any, outputs: Sequence[str], given: Any, pure: bool, together: bool) -> Any:
        constraints = [*outputs, *(_LETTER[kind] for kind, _ in given), *([] if pure else ["~{memory}"])]
        function = ir.FunctionType(returned, [ir_type(kind) for kind, _ in given])
        assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=not pure)
        values = [value for _, value in given]
        return self._builder.call(assembly, values, attrs=("convergent",) if together else ())

    def _several(
        self, text: str, returns: tuple[Any, int], given: Sequence[Any], *, pure: bool = False, together: bool = False
    ) -> list[Any]:
        kind, count = returns
        struct = ir.LiteralStructType([ir_type(kind)] * count)
        call = self._call(text, struct, [f"={_LETTER[kind]}"] * count, given, pure, together)
        return [self._builder.extract_value(call, place) for place in range(count)]

    def _one(self, text: str, kind: Any, given: Sequence[Any], *, pure: bool = False, together: bool = False) -> Any:
        return self._call(text, ir_type(kind), [f"={_LETTER[kind]}"], given, pure, together)

    def _none(self, text: str, given: Sequence[Any], *, together: bool = False) -> None:
        self._call(text, ir.VoidType(), (), given, False, together)


def unrolled(written: Callable[..., Any], count: int, *arguments: Any) -> Any:
    """Make an intrinsic of the instructions that a function writes; it returns `count` floats, one, or nothing.

    arguments  kinds of the function's arguments after its Instructions; a kind and a count for a tuple
    """
    kinds = [types.UniTuple(*each) if isinstance(each, tuple) else each for each in arguments]
    result = types.void if count == 0 else f32 if count == 1 else types.UniTuple(f32, count)
    signature = result(*kinds)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [
            [builder.extract_value(value, place) for place in range(each[1])] if isinstance(each, tuple) else value
            for each, value in zip(arguments, args, strict=True)
        ]
        made = written(Instructions(builder), *values)
        if count == 0:
            return context.get_dummy_value()
        return made if count == 1 else context.make_tuple(builder, signature.return_type, made)

    given: dict[int, Any] = {
        2: lambda context, a, b: (signature, codegen),
        3: lambda context, a, b, c: (signature, codegen),
        4: lambda context, a, b, c, d: (signature, codegen),
        8: lambda context, a, b, c, d, e, f, g, h: (signature, codegen),
        9: lambda context, a, b, c, d, e, f, g, h, i: (signature, codegen),
    }
    return intrinsic(given[len(arguments)])
