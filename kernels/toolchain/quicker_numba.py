"""This module replaces internals of Numba: a name that NumPy 2.5 lacks, slow functions, and a random order.

Importing this module imports Numba's CUDA target, with any NumPy that Numba supports. `quicken` replaces slow functions
by faster ones with the same results, since half of a compilation is Numba's own time. All is written for READ_FROM, the
release of numba-cuda that pyproject.toml names.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["READ_FROM", "quicken"]

READ_FROM = "0.30.4"


@contextlib.contextmanager
def _names_of_older_numpy() -> Iterator[None]:
    """Give NumPy the name that numba-cuda looks up when some of its modules are imported, for so long.

    NumPy 2.5 has no `row_stack`, an older name of `vstack`. numba-cuda (`np/arrayobj.py`) registers what kernels do for
    it, with every NumPy from 2.0 on; ours call neither.
    """
    if hasattr(np, "row_stack"):
        yield
        return

    def row_stack(arrays: Any) -> Any:  # a function of its own: what is registered for vstack stays
        return np.vstack(arrays)

    numpy: Any = np
    numpy.row_stack = row_stack
    try:
        yield
    finally:
        del numpy.row_stack


with _names_of_older_numpy():
    from numba.cuda import codegen, types
    from numba.cuda.core import analysis, base, ir, ir_utils, postproc, targetconfig, transforms
    from numba.cuda.cudadrv import nvvm
    from numba.cuda.np import arrayobj  # noqa: F401  else the first compilation imports it

NUMBERS = (types.Number, types.Boolean, types.Literal)
TEXTS = 512  # the modules of which the text for NVVM is kept


def quicken() -> None:
    """Replace Numba's functions by those below; each keeps the original as `__wrapped__`."""
    _compare_options_quickly()
    _know_types_of_calls()
    _know_sizes_of_numbers()
    _write_modules_once()
    _link_modules_in_order()
    _list_variables_quickly()
    _postprocess_less()
    _replace(analysis, "compute_live_map", _live_map)
    base._has_loc = functools.cache(base._has_loc)  # it inspected a signature wherever a function generates code


def _replace(owner: Any, name: str, function: Any) -> None:
    function.__wrapped__ = getattr(owner, name)
    setattr(owner, name, function)


def _compare_options_quickly() -> None:
    """Replace the comparison of options.

    Numba compares and hashes its options at every call that it types, each time as a new dictionary of all. Here only
    the set options are compared first, and all options have one hash, since few differ.
    """
    options = targetconfig.TargetConfig

    def equal(one: Any, other: object) -> Any:
        if not isinstance(other, options):
            return NotImplemented
        return one._values == other._values or one.values() == other.values()

    options.__eq__, options.__hash__ = equal, lambda one: hash(options)


def _know_types_of_calls() -> None:
    """Cache the types of operators' results.

    Each time that Numba meets an operator, it searches all its implementations for the operands' types. Here the result
    is kept with the function, for each context and types of numbers.
    """
    resolve = types.Function.get_call_type

    def known_or_resolved(function: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws or not all(isinstance(each, NUMBERS) for each in args):
            return resolve(function, context, args, kws)
        known, key = function.__dict__.setdefault("_known_calls", {}), (context, tuple(args))
        if key not in known:
            known[key] = resolve(function, context, args, kws)
        return known[key]

    _replace(types.Function, "get_call_type", known_or_resolved)


def _know_sizes_of_numbers() -> None:
    """Cache the sizes of numbers.

    For every variable Numba lets LLVM parse a module to get the size of its type. NVVM has one layout of data, so here
    the sizes of numbers are kept.
    """
    size_of = base.BaseContext.get_abi_sizeof
    numbers = (base.llvmir.IntType, base.llvmir.FloatType, base.llvmir.DoubleType)
    known: dict[str, Any] = {}

    def known_size(context: Any, kind: Any) -> Any:
        if not isinstance(kind, numbers):
            return size_of(context, kind)
        key = str(kind)
        if key not in known:
            known[key] = size_of(context, kind)
        return known[key]

    _replace(base.BaseContext, "get_abi_sizeof", known_size)


class _InOrder(dict[Any, None]):
    """A set that is iterated in the order of additions."""

    def add(self, each: Any) -> None:
        """Add an element; a new one comes last."""
        self[each] = None


def _link_modules_in_order() -> None:
    """Pass a kernel's device functions to NVVM in the order in which they are called.

    Numba keeps them in a set, ordered by their addresses in memory. Then the places of arrays in shared memory, and so
    the machine code, differ from process to process.
    """
    begin = codegen.CUDACodeLibrary.__init__

    def begin_in_order(library: Any, *args: Any, **kwargs: Any) -> None:
        begin(library, *args, **kwargs)
        library._linking_libraries = _InOrder()

    _replace(codegen.CUDACodeLibrary, "__init__", begin_in_order)


def _write_modules_once() -> None:
    """Cache the text of device functions' modules.

    For every kernel that calls a device function, Numba writes out its module and rewrites it in NVVM's dialect. A
    linked module does not change any more, so here both texts are kept.
    """

    def written(module: Any) -> Any:
        if "_written" not in module.__dict__:
            module._written = str(module)
        return module._written

    def llvm_strs(library: Any) -> Any:
        if library._llvm_strs is None:
            library._llvm_strs = [str(each) if each is library._module else written(each) for each in library.modules]
        return library._llvm_strs

    library = codegen.CUDACodeLibrary
    library.llvm_strs = property(functools.wraps(library.llvm_strs.fget)(llvm_strs))
    nvvm.llvm_replace = functools.lru_cache(TEXTS)(nvvm.llvm_replace)


def _list_variables_quickly() -> None:
    """List the variables of statements faster.

    Numba tests every part of an instruction for all possible classes, in two ways of listing variables. Here a part's
    type decides what it may contain, and an assignment, the most frequent statement, is listed in one way.
    """
    collected = ir_utils.compat_list_vars_stmt

    def listed(statement: Any) -> Any:
        known = type(statement) is ir.Assign and ir.Assign not in ir_utils.visit_vars_extensions
        return statement.list_vars() if known else collected(statement)

    _replace(ir_utils, "compat_list_vars_stmt", listed)
    _replace(ir.Inst, "_rec_list_vars", _variables)


VARIABLE, INSTRUCTION, SEQUENCE, MAPPING, OTHER = range(5)
KINDS = {VARIABLE: ir.var_types, INSTRUCTION: ir.inst_types, SEQUENCE: (list, tuple), MAPPING: (dict,)}


def _kind_of(kind: type) -> int:
    return next((name for name, classes in KINDS.items() if issubclass(kind, classes)), OTHER)


_kind: Any = functools.cache(_kind_of)


def _variables(_: Any, value: Any) -> Any:
    """List the variables in a part of an instruction."""
    kind = _kind(type(value))
    if kind == OTHER:
        return []
    if kind == VARIABLE:
        return [value]
    if kind == INSTRUCTION:
        return value.list_vars()
    found = []
    for each in value.values() if kind == MAPPING else value:
        kind = _kind(type(each))
        if kind == VARIABLE:
            found.append(each)
        elif kind != OTHER:
            found.extend(_variables(_, each))
    return found


def _postprocess_less() -> None:
    """Compute the liveness of variables only when it is needed.

    Numba computes it after each pass, nine times a function, and on blocks' entry, where only generators need it.
    """
    whole = postproc.PostProcessor.run

    def run(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        function = self.func_ir
        if function.is_generator:
            whole(self, emit_dels, extend_lifetimes)
            return
        function.blocks = transforms.canonicalize_cfg(function.blocks)
        function.variable_lifetime = postproc.VariableLifetime(function.blocks)
        function.generator_info = None
        if emit_dels:
            self._insert_var_dels(extend_lifetimes=extend_lifetimes)

    _replace(postproc.PostProcessor, "run", run)


def _live_map(cfg: Any, blocks: Any, used: dict[int, set[str]], defined: dict[int, set[str]]) -> dict[int, set[str]]:
    """Return the variables that must live at each block's entry, as `compute_live_map` does.

    Only variables that a block takes from another block are considered, which are few. Liveness spreads backwards, so
    the search begins with the last block.
    """
    shared = set[str]().union(*used.values())
    reached = {offset: shared & (defined[offset] | used[offset]) for offset in blocks}
    after = {offset: [to for to, _ in cfg.successors(offset)] for offset in blocks}
    grown = True
    while grown:
        grown = False
        for offset in blocks:
            for to in after[offset]:
                if not reached[offset] <= reached[to]:
                    reached[to] |= reached[offset]
                    grown = True
    live = {offset: set(used[offset]) for offset in blocks}
    passed = {offset: reached[offset] - defined[offset] for offset in blocks}
    grown = True
    while grown:
        grown = False
        for offset in reversed(blocks):
            for to in after[offset]:
                more = live[to] & passed[offset]
                if not more <= live[offset]:
                    live[offset] |= more
                    grown = True
    return live
