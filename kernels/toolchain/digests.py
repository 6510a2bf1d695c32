"""This module computes digests of all that decides a kernel's machine code, so that the cache knows stale kernels.

A kernel's digest covers its constants, the values that its function closes over, and the sources of the modules from
which it takes functions, with all that these import below lowlat.kernels. It is the same in every version of Python.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lowlat.kernels.toolchain.kernel import Kernel

__all__ = ["assembler", "compilers", "kernel_digest", "source_digest", "sources_of"]

PACKAGE = "lowlat.kernels"
SOURCES = Path(__file__).resolve().parents[1]  # the package, with its references: kernels take constants from them
COMPILER = SOURCES / "toolchain" / "compiler.py"  # every kernel goes through it
# left out: the facts that these give about a kernel are digested by value, and the rest changes no kernel
APART = {SOURCES / "toolchain" / name for name in ("digests.py", "kernel.py", "launches.py")}
COMPILERS = ("numba-cuda", "numba", "llvmlite", "nvidia-nvjitlink")
UNKNOWN = "unknown"
IMPORT = re.compile(r"^\s*(?:from|import)\s+(lowlat\.kernels[\w.]*)(?:\s+import\s+(\([^)]*\)|[^\n]*))?", re.MULTILINE)


@cache
def compilers() -> tuple[str, ...]:
    """Return the compilers that a kernel goes through, with their versions; without `assembler`'s."""
    return tuple(f"{package} {_version(package)}" for package in COMPILERS)


@cache
def assembler() -> str:
    """Return the version of NVVM, which makes PTX; "unknown" if it comes with a CUDA toolkit."""
    return _version("nvidia-nvvm")


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return UNKNOWN


@cache
def source_digest() -> str:
    """Return a digest of all kernels' sources and the compilers' versions."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update(repr((compilers(), assembler())).encode())
    return digest.hexdigest()


@cache
def kernel_digest(kernel: Kernel) -> str:
    """Return a digest of all that decides one kernel's machine code, except NVVM's version and the target.

    It is computed once a process: a start asks for it when it compiles ahead, and again when it loads the kernel.
    """
    modules: set[str] = set()
    meaning = _meaning(kernel.function, set(), modules)
    sizes = (kernel.threads, kernel.min_blocks, kernel.linked, kernel.specific, kernel.whole)
    files = {COMPILER, *(file for name in modules if (file := _file_of(name)) is not None)}
    facts = (kernel.name, str(kernel.signature), sizes, meaning, _digest_of(frozenset(files)), compilers())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _file_of(module: str) -> Path | None:
    """Return the file of a module; None for modules of the compilers, whose versions are digested instead."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None or module.partition(".")[0] in ("numba", "llvmlite") else Path(file).resolve()


@cache
def _digest_of(files: frozenset[Path]) -> str:
    """Return a digest of files and of all files that they import below the package."""
    digest = hashlib.sha256()
    for path in sorted(sources_of(files)):
        digest.update(_content(path).encode())
    return digest.hexdigest()


def sources_of(files: Iterable[Path]) -> set[Path]:
    """Return the files, and those of all modules below the package that they import, directly or not.

    Modules that only describe kernels are left out, with their imports.
    """
    found, ahead = set[Path](), list(files)
    while ahead:
        path = ahead.pop()
        if path not in found and path not in APART:
            found.add(path)
            ahead.extend(_imported(path))
    return found


@cache
def _content(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _imported(path: Path) -> tuple[Path, ...]:
    """Return the files of the modules below the package that a file imports, at its top or inside of functions."""
    return tuple(each for name, members in IMPORT.findall(_content(path)) for each in _files(name, members))


def _files(name: str, members: str) -> Iterator[Path]:
    """Yield the files of an import: a module's; or for each imported member of a package its own, or __init__."""
    place = SOURCES.joinpath(*name.removeprefix(PACKAGE).split("."))
    if place.with_suffix(".py").is_file():
        yield place.with_suffix(".py")
        return
    for member in re.findall(r"\w+", re.sub(r"#.*|\bas\s+\w+", "", members)) or ["__init__"]:
        file, package = place / f"{member}.py", place / member / "__init__.py"
        yield next((each for each in (file, package) if each.is_file()), place / "__init__.py")


def _meaning(value: Any, seen: set[int], modules: set[str]) -> Any:
    """Return a value that is equal for two closures exactly if they compile to the same.

    modules  out: the names of the modules that define its parts
    """
    function = _python_function(value)
    if function is not None:
        modules.add(function.__module__)
        if id(function) in seen:
            return function.__qualname__
        seen = seen | {id(function)}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        inner = [(name, _meaning(cell.cell_contents, seen, modules)) for name, cell in cells]
        return (function.__qualname__, sorted(inner, key=lambda each: each[0]), repr(function.__defaults__))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return (type(value).__name__, value)
    if isinstance(value, dict):
        value = sorted(value.items(), key=repr)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, tuple | list):
        return [_meaning(each, seen, modules) for each in value]
    modules.add(type(value).__module__)
    if isinstance(value, ModuleType):
        modules.add(value.__name__)
        return value.__name__
    if isinstance(value, type):
        modules.add(value.__module__)
        return (value.__module__, value.__qualname__)
    kind = type(value).__qualname__
    if is_dataclass(value):
        return [kind, *((each.name, _meaning(getattr(value, each.name), seen, modules)) for each in fields(value))]
    return kind if " at 0x" in repr(value) else (kind, str(value))


def _python_function(value: Any) -> FunctionType | None:
    """Return the Python function of a device function or an intrinsic, or a plain function itself; else None."""
    for name in ("py_func", "_defn"):
        inner = getattr(value, name, None)
        if isinstance(inner, FunctionType):
            return inner
    return value if isinstance(value, FunctionType) else None
