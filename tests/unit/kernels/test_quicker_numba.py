"""The replacements of slow spots of Numba's compiler give what Numba's own do."""

import copy
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
from llvmlite import ir as llvm_ir
from numba.cuda import codegen, compiler, types
from numba.cuda.core import analysis, base, ir, ir_utils, postproc
from numba.cuda.cudadrv import nvvm
from numba.cuda.descriptor import cuda_target

from lowlat.kernels.toolchain import numba_cuda, quicker_numba
from lowlat.kernels.toolchain.numba_cuda import compile_ptx, cuda, device_function, float32, int64


def branching(x: Any, count: Any, out: Any) -> Any:
    """Loops, a variable that only one path sets, tuples, slices, keywords, a dictionary and calls."""
    total = x
    if count > 3:
        first = x * 2
    for k in range(count):
        pair = (total, k, (x, 1))
        if k % 2:
            total = pair[0] + max(k, count)
            continue
        while total < 9:
            total, last = total + pair[2][0], k
            out[k], out[1] = total, last
            if total == 5:
                break
    if count > 3:
        total = total + first + out[0:2].sum(axis=0) + {"a": total}["a"]
        del out[0]
    return total


def straight(x: Any, count: Any, out: Any) -> Any:
    """One block."""
    out.size = x
    print(x, count)
    return [x, count, -x, out.size][1]


def generating(x: Any, count: Any, out: Any) -> Any:
    """Variables that live across yields."""
    for k in range(count):
        more = x + k
        yield more
        yield more + k
    yield out


def test_internals_are_those_that_were_read() -> None:
    """Another release may have other internals: read `quicker_numba` next to its sources, then change READ_FROM."""
    assert metadata.version("numba-cuda") == quicker_numba.READ_FROM


@pytest.mark.wide
def test_numpy_may_lack_what_later_releases_lack() -> None:
    """`row_stack` is gone from 2.5 on; it is not left after, nor is NumPy's own replaced where it has one."""
    code = """
import sys, warnings
import numpy as np
if sys.argv[1] == "without":
    vars(np).pop("row_stack", None)
before = vars(np).get("row_stack")
from lowlat.kernels.toolchain.numba_cuda import compile_ptx, cuda, types
assert vars(np).get("row_stack") is before
def kernel(out):
    out[cuda.threadIdx.x] = 1.0
assert "st.global" in compile_ptx(kernel, (types.Array(types.float32, 1, "C"),), (9, 0))[0]
"""
    for case in ("without", "as it is"):
        done = subprocess.run([sys.executable, "-c", code, case], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr


FUNCTIONS = pytest.mark.parametrize("function", [branching, straight, generating], ids=lambda each: each.__name__)


def shown(function: Any, emit_dels: bool) -> Any:
    """All that passes read of a function after one of them."""
    found = compiler.run_frontend(function, emit_dels=emit_dels)
    lives, generator = found.variable_lifetime, found.generator_info
    return (
        {offset: [str(each) for each in block.body] for offset, block in found.blocks.items()},
        (lives.usedefs, lives.livemap, lives.deadmaps),
        generator and [(point.live_vars, point.weak_live_vars) for point in generator.get_yield_points()],
        generator and generator.state_vars,
    )


@FUNCTIONS
@pytest.mark.parametrize("emit_dels", [False, True])
def test_functions_are_prepared_alike(function: Any, emit_dels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shown(function, emit_dels)
    for owner, name in (
        (postproc.PostProcessor, "run"),
        (ir.Inst, "_rec_list_vars"),
        (ir_utils, "compat_list_vars_stmt"),
        (analysis, "compute_live_map"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    assert shown(function, emit_dels) == found


@FUNCTIONS
def test_all_variables_of_a_statement_are_listed(function: Any) -> None:
    """Of every statement and what it is made of."""
    for block in compiler.run_frontend(function).blocks.values():
        for statement in block.body:
            found = ir_utils.compat_list_vars_stmt(statement)
            assert set(ir_utils.compat_list_vars_stmt.__wrapped__(statement)) == set(found)  # no caller asks for order
            for part in (vars(statement), [vars(statement), (1, None, [*found])]):
                assert statement._rec_list_vars(part) == ir.Inst._rec_list_vars.__wrapped__(statement, part)


@FUNCTIONS
def test_what_lives_where_is_found_without_what_stays_in_a_block(function: Any) -> None:
    found = compiler.run_frontend(function)
    lives = found.variable_lifetime
    given = (lives.cfg, found.blocks, lives.usedefs.usemap, lives.usedefs.defmap)
    before = copy.deepcopy(given[2:])
    assert analysis.compute_live_map(*given) == analysis.compute_live_map.__wrapped__(*given)
    assert before == given[2:]
    assert function is straight or any(lives.livemap.values())


def test_a_function_s_parameters_are_asked_once() -> None:
    def made(with_loc: bool) -> Any:
        def plain(context: Any) -> None: ...

        def located(context: Any, loc: Any) -> None: ...

        return located if with_loc else plain

    for function in (made(True), made(False)):
        assert base._has_loc(function) is base._has_loc.__wrapped__(function) is base._has_loc(function)


def test_sizes_of_numbers_and_others_are_those_of_the_gpu() -> None:
    context, half = cuda_target.target_context, llvm_ir.IntType(16)
    numbers = [llvm_ir.IntType(bits) for bits in (1, 8, 16, 32, 64)] + [llvm_ir.FloatType(), llvm_ir.DoubleType()]
    kinds = [*numbers, half.as_pointer(), llvm_ir.ArrayType(half, 3), llvm_ir.LiteralStructType([half, numbers[4]])]
    asked = base.BaseContext.get_abi_sizeof
    for kind in kinds * 2:
        assert context.get_abi_sizeof(kind) == asked.__wrapped__(context, kind)
    assert [context.get_abi_sizeof(kind) for kind in numbers] == [1, 1, 2, 4, 8, 4, 8]


def test_a_function_that_two_kernels_call_is_written_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel is of the same code as if it were written out for each."""

    @device_function
    def inner(x: Any) -> Any:
        return x * float32(3.0) + float32(1.0)

    @device_function
    def outer(x: Any) -> Any:
        return inner(x) * inner(x + float32(2.0))

    def one(out: Any) -> None:
        out[cuda.threadIdx.x] = outer(float32(out[cuda.threadIdx.x]))

    def other(out: Any) -> None:
        cuda.atomic.add(out, int64(1), inner(out[cuda.threadIdx.x]))

    signature, written = (types.Array(types.float32, 1, "C"),), []

    def recorded(texts: list[str], **options: Any) -> Any:
        written.append(texts)
        return compile_ir(texts, **options)

    compile_ir = nvvm.compile_ir
    monkeypatch.setattr(nvvm, "compile_ir", recorded)

    def made() -> list[str]:
        return [re.sub(r"_ZN\w+", "", compile_ptx(function, signature, (9, 0))[0]) for function in (one, other)]

    found = made()
    assert written[0][-1] in written[1] and any(a is b for a in written[0] for b in written[1])
    monkeypatch.setattr(
        codegen.CUDACodeLibrary, "llvm_strs", property(codegen.CUDACodeLibrary.llvm_strs.fget.__wrapped__)
    )
    monkeypatch.setattr(nvvm, "llvm_replace", nvvm.llvm_replace.__wrapped__)
    assert found == made()


def test_a_function_of_a_known_meaning_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        def add(x: Any) -> Any:
            return x + 5

        return device_function(add)

    made = make()
    monkeypatch.setattr(numba_cuda.cuda, "jit", lambda **_: pytest.fail("it was made again"))
    assert make() is made


def test_modules_are_linked_in_the_order_in_which_they_are_called() -> None:
    """Not by their addresses in memory, which differ from process to process."""
    context = cuda_target.target_context
    library, others = (context.codegen().create_library("order"), [])
    for number in range(40):
        others.append(context.codegen().create_library(f"called_{number}"))
        others[-1].add_ir_module(others[-1].create_ir_module(f"module_{number}"))
    for each in (*others, *others[::2]):  # one that is called again keeps its place
        library.add_linking_library(each)
    assert list(library._linking_libraries) == others


def test_ptx_does_not_tell_what_was_compiled_before() -> None:
    """Functions and arrays in shared memory are numbered anew; what is no number of a function stays."""

    def make() -> Any:
        def swapped(x: Any) -> Any:
            kept = cuda.shared.array(32, float32)
            kept[cuda.threadIdx.x] = x
            cuda.syncthreads()
            return kept[31 - cuda.threadIdx.x]

        inner = cuda.jit(device=True)(swapped)

        def outer(out: Any) -> None:
            kept = cuda.shared.array(64, float32)
            kept[cuda.threadIdx.x + 32] = inner(out[cuda.threadIdx.x])
            cuda.syncthreads()
            out[cuda.threadIdx.x] = kept[63 - cuda.threadIdx.x]

        return outer

    signature = (types.Array(types.float32, 1, "C"),)
    found = [compile_ptx(make(), signature, (9, 0)) for _ in range(12)]  # numbers of one digit and of two
    assert all(each == found[0] for each in found)
    ptx, entry = found[0]
    assert f".entry {entry}(" in ptx and set(re.findall(r"_cudapy_smem_(\d+)", ptx)) == {"1", "2"}
    assert numba_cuda._numbered_anew("_ZN1aB3v12B4abcdE B3v1Bx _ZN1bB2v7B4abcdE _ZN1aB3v12B4abcdE") == (
        "_ZN1aB2v1B4abcdE B3v1Bx _ZN1bB2v2B4abcdE _ZN1aB2v1B4abcdE"
    )
