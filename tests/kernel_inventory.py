"""All kernels that modules give as examples, found by walking the modules, and what their names must tell apart."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import lowlat.kernels
from lowlat.kernels.toolchain.kernel import H200, Card, Kernel

B200 = Card(148, 227 * 1024, (10, 0))
# A card of each capability for which kernels must compile: A100, H200, RTX 5090. 10.0 stands for the capability alone,
# with H200's size: it has the same functions, of which Numba's part of a compilation is done once for both. A B200's
# own size changes counts of tiles, blocks and stages, which tests of plans look at.
CARDS = {
    card.capability: card
    for card in (
        Card(108, 163 * 1024, (8, 0)),
        H200,
        Card(H200.num_multiprocessors, H200.shared_bytes, (10, 0)),
        Card(170, 99 * 1024, (12, 0)),
    )
}
# Capabilities between those: one kernel of each kind must compile for one of them, the whole step of a Llama and a
# mixture's. They have the RTX 5090's size, so that Numba's part is done once for all three.
MINOR_CARDS = {capability: Card(170, 99 * 1024, capability) for capability in ((8, 6), (8, 9))}


def modules() -> dict[str, Any]:
    """Every module of `lowlat.kernels`, the references left out, by its name below it."""
    entries = pkgutil.walk_packages(lowlat.kernels.__path__, "lowlat.kernels.")
    found = (entry.name for entry in entries if not entry.ispkg and ".reference." not in entry.name)
    return {name.removeprefix("lowlat.kernels."): importlib.import_module(name) for name in sorted(found)}


def examples(card: Card = H200) -> Iterator[tuple[str, Kernel]]:
    """(module, kernel) for every example, each once; a module whose plans depend on the card gives this card's."""
    for name, module in modules().items():
        if hasattr(module, "examples"):
            takes_card = "card" in inspect.signature(module.examples).parameters
            made = module.examples(card) if takes_card else module.examples()
            for kernel in {id(kernel): kernel for kernel in made}.values():
                yield name, kernel


def first_examples(card: Card, *, variants: bool = False) -> Iterator[tuple[str, Kernel]]:
    """(module, kernel) for the first example of each kind of kernel. variants: of each that differs in more than sizes,
    which are the digits of its name."""
    kinds: dict[tuple[str, str], tuple[str, Kernel]] = {}
    for name, kernel in examples(card):
        kinds.setdefault((family(kernel), re.sub(r"\d+", "", kernel.name) if variants else ""), (name, kernel))
    yield from kinds.values()


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
    """What a kernel is without its constants: where its function was made."""
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
    """The function behind a device function or an intrinsic, or a plain one."""
    for name in ("py_func", "_defn"):
        inner = getattr(value, name, None)
        if isinstance(inner, FunctionType):
            return inner
    return value if isinstance(value, FunctionType) else None
