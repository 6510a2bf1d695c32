"""A compiled kernel is stale by a change of its own sources, wherever they stand, its constants and the compilers."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowlat.kernels.toolchain import digests
from lowlat.kernels.toolchain.digests import kernel_digest, source_digest, sources_of
from lowlat.kernels.toolchain.kernel import Kernel
from lowlat.kernels.toolchain.numba_cuda import device_function

CACHED = (digests.compilers, digests.assembler, digests._digest_of, digests._content, digests._imported)
FILES = {
    "toolchain/compiler.py": "from lowlat.kernels.toolchain import numba_cuda\n",
    "toolchain/numba_cuda.py": "",
    "elementwise/norm.py": (
        "from lowlat.kernels.common import (\n    memory,  # of words\n)\nimport lowlat.kernels.formats as formats\n"
    ),
    "common/__init__.py": "",
    "common/memory.py": "def load():\n    from lowlat.kernels.formats.bf16 import WORD  # late\n",
    "formats/__init__.py": "from lowlat.kernels.formats.fp8 import CODES\n",
    "formats/bf16.py": "WORD = 2\n",
    "formats/fp8.py": "CODES = 8\n",
    "elementwise/embed.py": "from lowlat.kernels.common.memory import load\n",
    "handed.py": "",
}
APART = {"elementwise/embed.py", "common/__init__.py", "handed.py"}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of kernels, in place of the real one."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(digests, "SOURCES", tmp_path)
    monkeypatch.setattr(digests, "COMPILER", tmp_path / "toolchain" / "compiler.py")
    return tmp_path


@pytest.fixture(autouse=True)
def asked_anew() -> Any:
    """Everything that is kept while sources stand still is forgotten."""
    yield
    forget()


def forget() -> None:
    """Look at all again."""
    for each in (*CACHED, kernel_digest, source_digest):
        each.cache_clear()


def module_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which a file passes for an imported module."""
    spec = importlib.util.spec_from_loader(f"digested_{path.stem}", None)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    made.__file__ = str(path)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


def make(module: str, constant: Any, handed: Any = None) -> Kernel:
    """A kernel of a module, with what it closes over."""

    def body(out: Any) -> None:
        out[0] = constant + handed(0)

    body.__module__ = module
    return Kernel("body", body, ("int64[:]",), 32)


@pytest.mark.parametrize("changed", FILES)
def test_a_kernel_depends_on_what_its_module_imports(
    changed: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the top or in a function, through packages, and on the compiler; an unrelated module is another's business."""
    kernel = make(module_of(sources / "elementwise" / "norm.py", monkeypatch), 1)
    before, all_before = kernel_digest(kernel), source_digest()
    (sources / changed).write_text(FILES[changed] + "# changed\n")
    assert kernel_digest(kernel) == before  # read once a process, as the modules are
    forget()
    assert (kernel_digest(kernel) == before) == (changed in APART)
    assert source_digest() != all_before


def test_a_function_that_is_handed_in_brings_its_sources(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_one(value: Any) -> Any:
        return value + 1

    add_one.__module__ = module_of(sources / "handed.py", monkeypatch)
    name = module_of(sources / "elementwise" / "norm.py", monkeypatch)
    kernels = [make(name, 1, given) for given in (None, add_one, device_function(add_one))]
    before = [kernel_digest(each) for each in kernels]
    (sources / "handed.py").write_text("# changed\n")
    forget()
    after = [kernel_digest(each) for each in kernels]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]


def test_constants_sizes_and_compilers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same name, too; a set's order, which a process draws, does not."""
    known = make(__name__, 1)
    values = [1, 2, 1.0, True, None, "1", (1, 2), [2, 1], {"a": 1}, {"a": 2}, frozenset("abc"), int, Path, known]
    kernels = [make(__name__, value) for value in values]
    kernels += [replace(known, **change) for change in ({"threads": 64}, {"min_blocks": 2}, {"specific": True})]
    found = [kernel_digest(each) for each in kernels]
    assert len(set(found)) == len(kernels)
    assert (
        kernel_digest(known) == found[0] == kernel_digest(replace(known, shared_bytes=9))
    )  # a launch's, not the code's
    forget()
    monkeypatch.setattr(digests, "version", lambda package: "another")
    assert kernel_digest(known) != found[0]


def test_the_real_sources_are_found() -> None:
    """A normalisation's few, not the products'; not what only describes kernels."""
    found = sources_of([digests.SOURCES / "elementwise" / "norm.py"])
    near = {path.relative_to(digests.SOURCES).as_posix() for path in found}
    assert {"elementwise/norm.py", "common/norm_math.py", "toolchain/ptx.py", "toolchain/numba_cuda.py"} <= near
    assert not {name for name in near if name.startswith(("gemm/", "moe/", "attention/", "toolchain/kernel"))}
    assert all(path.is_file() for path in sources_of(digests.SOURCES.rglob("*.py")))
