"""Numba's internals that are replaced: a name that NumPy 2.5 lacks, slow spots of the compiler, an order of chance.

Importing this module imports Numba's CUDA target, with any NumPy that Numba takes; `quicken` puts functions of the same
results in place of slow ones, since half of a compilation is Numba's own. All is written for READ_FROM, the release of
numba-cuda that pyproject.toml names.
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
    """Put everything below in place of Numba's own, which each keeps as `__wrapped__`."""
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
    """Numba compares and hashes its options at every call that it types, each time as a new dictionary of them all.

    Here what was set is compared first, and all options have one hash: few differ.
    """
    options = targetconfig.TargetConfig

    def equal(one: Any, other: object) -> Any:
        if not isinstance(other, options):
            return NotImplemented
        return one._values == other._values or one.values() == other.values()

    options.__eq__, options.__hash__ = equal, lambda one: hash(options)


def _know_types_of_calls() -> None:
    """Numba asks all that it knows of an operator, each time that it meets one, which results from numbers as operands.

    Here what it found is kept next to the function, for each context and types of numbers.
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
    """Numba has LLVM parse a module to learn how large a variable of a type is, for every variable.

    Here numbers' sizes are kept; NVVM has one layout of data.
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
    """A set that is iterated in the order in which things were added."""

    def add(self, each: Any) -> None:
        """Add something, at the end where it is new."""
        self[each] = None


def _link_modules_in_order() -> None:
    """Numba keeps the functions that a kernel calls in a set, by their addresses in memory, and NVVM gets them so.

    Where arrays in shared memory lie, and with them the machine code, then differs from process to process. Here
    functions come in the order in which they are called.
    """
    begin = codegen.CUDACodeLibrary.__init__

    def begin_in_order(library: Any, *args: Any, **kwargs: Any) -> None:
        begin(library, *args, **kwargs)
        library._linking_libraries = _InOrder()

    _replace(codegen.CUDACodeLibrary, "__init__", begin_in_order)


def _write_modules_once() -> None:
    """Numba writes out a device function's module for every kernel that calls it, and rewrites it in NVVM's dialect.

    Here both texts are kept: what is linked is finished, and changes no more.
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
    """Numba asks every part of an instruction for all classes that it may be of, in two ways of listing variables.

    Here what a part may hold is known by its type, and an assignment, which most statements are, is asked one way.
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
    """The variables in a part of an instruction."""
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
    """Numba finds out after each pass, nine times a function, what lives where; on blocks' entry only for generators.

    Here the rest is found out when something asks for it.
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
    """The variables that must live at each block's entry, as `compute_live_map` finds them.

    Only those matter that some block takes from others, a few of all; and liveness, which spreads backwards, is looked
    for from the last block on.
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
