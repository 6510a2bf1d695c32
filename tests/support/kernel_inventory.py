"""All kernels that modules give as examples, found by walking the modules, and what their names must tell apart."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import lowlat.kernels
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel

B200 = Gpu(148, 227 * 1024, (10, 0))
# A GPU of each capability for which kernels must compile: A100, H200, RTX 5090. 10.0 stands for the capability alone,
# with H200's size: it has the same functions, of which Numba's part of a compilation is done once for both. A B200's
# own size changes counts of tiles, blocks and stages, which tests of plans look at.
GPUS = {
    gpu.capability: gpu
    for gpu in (
        Gpu(108, 163 * 1024, (8, 0)),
        H200,
        Gpu(H200.num_multiprocessors, H200.shared_bytes, (10, 0)),
        Gpu(170, 99 * 1024, (12, 0)),
    )
}


def modules() -> dict[str, Any]:
    """Every module of `lowlat.kernels`, the references left out, by its name below it."""
    entries = pkgutil.walk_packages(lowlat.kernels.__path__, "lowlat.kernels.")
    found = (entry.name for entry in entries if not entry.ispkg and ".reference." not in entry.name)
    return {name.removeprefix("lowlat.kernels."): importlib.import_module(name) for name in sorted(found)}


def examples(gpu: Gpu = H200) -> Iterator[tuple[str, Kernel]]:
    """(module, kernel) for every example, each once; a module whose plans depend on the GPU gives this GPU's."""
    for name, module in modules().items():
        if hasattr(module, "examples"):
            made = module.examples(gpu) if takes_gpu(module) else module.examples()
            for kernel in {id(kernel): kernel for kernel in made}.values():
                yield name, kernel


def takes_gpu(module: Any) -> bool:
    """Whether a module's plans depend on the GPU."""
    return "gpu" in inspect.signature(module.examples).parameters


def first_examples(gpu: Gpu) -> Iterator[tuple[str, Kernel]]:
    """(module, kernel) for the first example of each kind of kernel."""
    yield from {family(kernel): (name, kernel) for name, kernel in reversed([*examples(gpu)])}.values()


def variants(gpu: Gpu) -> Iterator[tuple[str, Kernel]]:
    """(module, kernel) for examples that differ in more than sizes: each has a word in its name that none before it of
    its kind has. Sizes are digits, with an x between two; words of a plan (True, False and 0) count by their place."""
    known: dict[str, set[str]] = defaultdict(set)
    for name, kernel in examples(gpu):
        words = {
            f"{place} {word}" if word in ("True", "False", "0") else re.sub(r"\d+(x\d+)*", "", word)
            for place, word in enumerate(kernel.name.split("_"))
        }
        if family(kernel) not in known or words - known[family(kernel)]:
            yield name, kernel
        known[family(kernel)] |= words


def offers_calls(module: Any) -> list[str]:
    """Public functions of a module that return kernel calls, by their annotation; none where it only puts together what
    other modules make."""
    tree = ast.parse(Path(module.__file__).read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if "KernelCall" not in called:
        return []
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_")
    return [f.name for f in functions if f.returns is not None and "KernelCall" in ast.unparse(f.returns)]


def factories(module: Any) -> list[str]:
    """Functions of a module that make a Kernel, cached ones: one for each kind of kernel."""
    made = []
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
            if any(isinstance(call, ast.Name) and call.id == "Kernel" for call in calls):
                made.append(node.name)
    return made


def family(kernel: Kernel) -> str:
    """Name a kernel without its constants: where its function was made."""
    return f"{kernel.function.__module__}.{kernel.function.__qualname__}"


def fingerprint(kernel: Kernel) -> tuple[Any, ...]:
    """Everything that decides what a kernel compiles to, and how it is loaded: its code, the constants it closes over,
    what it calls, its sizes."""
    sizes = (kernel.threads, kernel.min_blocks, kernel.shared_bytes, kernel.linked, kernel.most_blocks)
    return (str(kernel.signature), *sizes, _meaning(kernel.function, set()))


def _meaning(value: Any, seen: set[int]) -> Any:
    """A value that two closures share exactly when they compile to the same."""
    function = _python_function(value)
    if function is None:
        if isinstance(value, tuple | list):
            return tuple(_meaning(each, seen) for each in value)
        if isinstance(value, bool | int | float | str) or value is None:
            return (type(value).__name__, value)
        return str(value)
    if id(function) in seen:
        return function.__qualname__
    seen = seen | {id(function)}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inner = tuple((name, _meaning(cell.cell_contents, seen)) for name, cell in cells)
    return (function.__qualname__, function.__code__.co_code, _constants(function.__code__), inner)


def _constants(code: CodeType) -> tuple[str, ...]:
    return tuple(repr(value) for value in code.co_consts if not isinstance(value, CodeType))


def _python_function(value: Any) -> Callable[..., Any] | None:
    """The function after a device function or an intrinsic, or a plain one."""
    for name in ("py_func", "_defn"):
        inner = getattr(value, name, None)
        if isinstance(inner, FunctionType):
            return inner
    return value if isinstance(value, FunctionType) else None
