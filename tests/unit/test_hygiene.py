"""Rules for every file of the packages, whatever files there are: safety, layering, sizes, names."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from stages import LONGEST

TOP_LEVEL = {
    *{"lowlat", "graphs", "kernels", "ipc", "src", "tests", "bench", "docs"},
    *{"pyproject.toml", "constraints.txt", "README.md", "LICENSE"},
    *{".ci", ".gitignore", ".gitattributes", ".pre-commit-config.yaml"},
}
FOLDERS = ("graphs", "kernels", "ipc")
PACKAGES = ("lowlat", *FOLDERS)
BELOW = {"kernels": ("lowlat.graphs",)}  # what a folder may know next to itself: references declare schemas
# lowlat's own folders, bottom up: imports go down only, so that there is no circle
LAYERS = (
    *(
        "demo",
        "errors",
        "options",
        "checkpoint",
        "text",
        "models",
        "sequence",
        "speculators",
        "step",
        "lowering",
        "executors",
    ),
    *("engine", "serving", "tools", "ray", "cli"),
)
# the engine's, alike, from what is kept of requests and devices up to the runtime; names for type checkers do not count
ENGINE = (
    *("metrics", "change_guard", "memory", "loading", "numerics", "mailbox", "scheduling", "sessions", "requests"),
    *("launches", "drafting", "figures", "steps", "sleep", "calls", "stepped", "runtime"),
)
BENCH_ONLY = {"gguf", "matplotlib", "transformers"}  # the extra `bench`; may be absent where tests run
# who may import the GPU's libraries: a port to another compiler or launcher touches these files alone
IMPORTERS = {
    "numba": {f"kernels/toolchain/{name}.py" for name in ("numba_cuda", "numba_cpu", "quicker_numba")},
    "llvmlite": {
        f"kernels/toolchain/{name}.py" for name in ("ptx", "ptx_attention", "ptx_hopper", "ptx_state", "ptx_warp")
    },
    "cuda": {
        *("kernels/toolchain/compiler.py", "graphs/launch.py", "lowlat/executors/launcher.py"),
        *("lowlat/executors/distributed/peers.py", "lowlat/executors/residence/mapped.py"),
    },
}
LAZILY = {"cuda"}  # inside functions: the modules around them are imported where there is no driver

# Code hidden in data, by the dotted name that a reference resolves to; a name stands for all below it.
FORBIDDEN = {
    **dict.fromkeys(("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"), "pickle"),
    **dict.fromkeys(
        ("eval", "exec", "compile", "builtins.eval", "builtins.exec", "builtins.compile"), "code from text"
    ),
    **dict.fromkeys(("torch.load", "torch.hub", "torch.package", "torch.jit.load", "torch.serialization"), "pickle"),
    **dict.fromkeys(("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"), "not yaml.safe_load"),
    **dict.fromkeys(("yaml.unsafe_load_all", "yaml.full_load_all"), "not yaml.safe_load"),
    **dict.fromkeys(("jinja2.Environment", "jinja2.environment"), "no sandbox"),
    **dict.fromkeys(("jinja2.nativetypes", "jinja2.sandbox.SandboxedEnvironment"), "mutable or no sandbox"),
    **dict.fromkeys(("os.system", "os.popen"), "a shell"),
}
FORBIDDEN_CALLS = {"jinja2.Template": "no sandbox"}  # as an annotation it is harmless
FORBIDDEN_KEYWORDS = {"trust_remote_code": True, "allow_pickle": True, "shell": True, "weights_only": False}


@dataclass(frozen=True)
class Module:
    """One module of the packages, parsed."""

    path: Path  # relative to the checkout
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        """lowlat, graphs, kernels or ipc."""
        return self.path.parts[0]

    @property
    def name(self) -> str:
        """The one name under which it is imported."""
        parts = self.path.with_suffix("").parts
        parts = parts if parts[0] == "lowlat" else ("lowlat", *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """This is the package from which a relative import of one dot starts."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@pytest.fixture(scope="module")
def modules(repository: Path, tree_files: list[Path]) -> list[Module]:
    """Every module of the four folders, each once."""
    found = []
    for path in tree_files:
        if path.parts[0] in PACKAGES and path.suffix == ".py":
            text = (repository / path).read_text()
            found.append(Module(path, text, ast.parse(text, str(path))))
    assert {module.folder for module in found} == set(PACKAGES)
    return found


@cache
def walked(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module, found once for all tests."""
    return list(ast.walk(tree))


def imported_from(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module that a from-import reads."""
    if node.level == 0:
        return node.module or ""
    start = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*start, *([node.module] if node.module else [])])


def bindings(tree: ast.Module, package: str) -> dict[str, str]:
    """Map each imported local name to its dotted name."""
    names = {}
    for node in walked(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{imported_from(node, package)}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    """The dotted name of an expression such as `t.load` after `import torch as t`, or None."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        start = dotted(node.value, names)
        return None if start is None else f"{start}.{node.attr}"
    return None


def why_forbidden(name: str, table: dict[str, str]) -> str | None:
    """Why a dotted name is forbidden, itself or through what it lies in; None where it is not."""
    parts = name.split(".")
    heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((table[head] for head in heads if head in table), None)


def keyword_values(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Constants passed by keyword, or written under a string key in a dict."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg and isinstance(keyword.value, ast.Constant):
                yield keyword.arg, keyword.value.value
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                yield str(key.value), value.value


def dangers(tree: ast.Module, package: str = "lowlat") -> Iterator[str]:
    """Every place in a module that could run code out of data, as `line: what (why)`."""
    names = bindings(tree, package)
    for node in walked(tree):
        suspects: list[tuple[str | None, dict[str, str]]] = []
        if isinstance(node, ast.Import):
            suspects = [(alias.name, FORBIDDEN) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = imported_from(node, package)
            suspects = [(f"{source}.{alias.name}", FORBIDDEN) for alias in node.names]
        elif isinstance(node, ast.Name | ast.Attribute):
            suspects = [(dotted(node, names), FORBIDDEN)]
        elif isinstance(node, ast.Call):
            suspects = [(dotted(node.func, names), FORBIDDEN_CALLS)]
            suspects += [(name, FORBIDDEN) for name in imported_by_call(node, names)]
        for name, table in suspects:
            why = why_forbidden(name, table) if name else None
            if why:
                yield f"{getattr(node, 'lineno', 0)}: {name} ({why})"
        for keyword, value in keyword_values(node):
            if keyword in FORBIDDEN_KEYWORDS and value is FORBIDDEN_KEYWORDS[keyword]:
                yield f"{getattr(node, 'lineno', 0)}: {keyword}={value}"


def imported_by_call(node: ast.Call, names: dict[str, str]) -> list[str]:
    """The module that `import_module("x")` or `__import__("x")` names, if it names one outright."""
    importers = {"importlib.import_module", "__import__", "builtins.__import__"}
    if dotted(node.func, names) not in importers or not node.args:
        return []
    first = node.args[0]
    return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []


def lowlat_imports(module: Module) -> Iterator[tuple[int, str]]:
    """Every name of lowlat that a module imports, wherever in it, lazily or not."""
    names = bindings(module.tree, module.package)
    for node in walked(module.tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = imported_from(node, module.package)
            found = [f"{source}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            found = imported_by_call(node, names)
        for name in found:
            if name.split(".")[0] in PACKAGES:
                yield getattr(node, "lineno", 0), name


def lies_in(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of these packages or below it."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def layering_faults(module: Module) -> Iterator[str]:
    """Every import that points the wrong way: a folder knows itself, lowlat.errors, and what BELOW says."""
    for line, name in lowlat_imports(module):
        if lies_in(name, *FOLDERS):
            yield f"{module.path}:{line}: {name} exists only inside a checkout; say lowlat.{name}"
        elif module.folder != "lowlat" and not lies_in(
            name, f"lowlat.{module.folder}", "lowlat.errors", *BELOW.get(module.folder, ())
        ):
            yield f"{module.path}:{line}: {module.folder} may not know {name}"


def upward_imports(module: Module) -> Iterator[str]:
    """Every import of a layer above a module's own; the package itself, which knows them all, is the topmost's."""
    layer = module.path.parts[1].removesuffix(".py")
    if layer not in LAYERS:
        yield f"{module.path}: {layer} is no layer"
        return
    height = LAYERS.index(layer)
    for line, name in lowlat_imports(module):
        other = name.split(".")[1] if "." in name else ""
        if lies_in(name, *(f"lowlat.{folder}" for folder in FOLDERS)) or layer == LAYERS[-1]:
            continue
        if other not in LAYERS or LAYERS.index(other) > height:
            yield f"{module.path}:{line}: {layer} may not import {name}, which lies above it"


def upward_in_engine(module: Module) -> Iterator[str]:
    """Every import, when a module of the engine is loaded, of a part of the engine above its own."""
    part = module.path.parts[2].removesuffix(".py")
    if part not in (*ENGINE, "__init__"):
        yield f"{module.path}: {part} is no part of the engine"
        return
    names = [
        node
        for node in module.tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    loaded = Module(module.path, module.text, ast.Module(names, []))
    for line, name in lowlat_imports(loaded):
        other = name.split(".")[2] if lies_in(name, "lowlat.engine") and name.count(".") > 1 else ""
        if other in ENGINE and ENGINE.index(other) > ENGINE.index(part):
            yield f"{module.path}:{line}: engine's {part} may not import {name}, which lies above it"


def gpu_import_faults(module: Module) -> Iterator[str]:
    """Every import of a GPU library where it does not belong, or at module level where it must be lazy."""
    names = bindings(module.tree, module.package)
    at_module_level = {id(node) for node in module.tree.body}
    for node in walked(module.tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [node.module or ""]
        elif isinstance(node, ast.Call):
            found = imported_by_call(node, names)
        for top in {name.split(".")[0] for name in found} & IMPORTERS.keys():
            place = f"{module.path}:{getattr(node, 'lineno', 0)}"
            if module.path.as_posix() not in IMPORTERS[top]:
                yield f"{place}: {top} is imported only in {', '.join(sorted(IMPORTERS[top]))}"
            elif top in LAZILY and id(node) in at_module_level:
                yield f"{place}: {top} is imported inside functions only"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal",
        "import importlib\nimportlib.import_module('shelve')",
        "from importlib import import_module as load\nload('pickle')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "from torch import load as read",
        "import torch.serialization",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "eval('1')",
        "run = exec",
        "import builtins\nbuiltins.eval('1')",
        "compile('1', 'x', 'eval')",
        "load(trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "load(weights_only=False)",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import os\nos.system('x')",
        "import yaml\nyaml.load('x', Loader=None)",
        "from yaml import unsafe_load",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Environment",
        "from jinja2 import Template\nTemplate('x')",
        "import jinja2 as j\nj.Template('x')",
        "from jinja2.sandbox import SandboxedEnvironment",
        "from jinja2.nativetypes import NativeEnvironment",
    ],
)
def test_scanner_sees_danger(source: str) -> None:
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(f)\nmodel.eval()\nmodel.load()",
        "import yaml\nyaml.safe_load('x')",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "from jinja2 import Template, TemplateError\ndef f() -> Template: ...",
        "load(trust_remote_code=False, allow_pickle=False)",
        "from safetensors.torch import load_file",
    ],
)
def test_scanner_lets_the_harmless_pass(source: str) -> None:
    assert not list(dangers(ast.parse(source)))


@pytest.mark.second
def test_nothing_runs_code_out_of_data(modules: list[Module]) -> None:
    found = [f"{module.path}:{danger}" for module in modules for danger in dangers(module.tree, module.package)]
    assert not found, "\n".join(found)


def test_dependencies_point_one_way(modules: list[Module]) -> None:
    faults = [fault for module in modules for fault in layering_faults(module)]
    assert not faults, "\n".join(faults)


# what each check of imports must let pass (True), and what not
IMPORT_CASES = {
    layering_faults: [
        ("kernels/a.py", "from lowlat.errors import ShapeError\nfrom lowlat.kernels import b\nimport torch", True),
        ("kernels/reference/a.py", "from . import b\nfrom .. import c", True),
        ("lowlat/a.py", "from lowlat.graphs import Bucket\nfrom . import kernels", True),
        ("kernels/a.py", "from lowlat.graphs import Bucket", True),
        ("kernels/a.py", "from .. import config", False),
        ("kernels/a.py", "import lowlat", False),
        ("graphs/a.py", "def f():\n    from lowlat.kernels import b", False),
        ("graphs/a.py", "import importlib\nimportlib.import_module('lowlat.engine.runtime')", False),
        ("ipc/__init__.py", "from lowlat import request", False),
        ("ipc/__init__.py", "from ..runtime import Runtime", False),
        ("lowlat/a.py", "import kernels", False),
        ("lowlat/a.py", "from graphs.buckets import Bucket", False),
    ],
    gpu_import_faults: [
        ("kernels/toolchain/numba_cuda.py", "from numba import cuda", True),
        ("kernels/elementwise/norm.py", "from lowlat.kernels.toolchain.numba_cuda import cuda", True),
        ("kernels/elementwise/norm.py", "from numba import cuda", False),
        ("kernels/elementwise/norm.py", "def f():\n    import numba.cuda", False),
        ("kernels/elementwise/norm.py", "import importlib\nimportlib.import_module('numba.cuda')", False),
        ("kernels/toolchain/numba_cuda.py", "from llvmlite import ir", False),
        ("graphs/launch.py", "def f():\n    from cuda.core import launch", True),
        ("graphs/launch.py", "from cuda.core import launch", False),
        ("graphs/capture.py", "def f():\n    from cuda.core import Device", False),
        ("lowlat/engine/runtime.py", "import torch\ntorch.cuda.init()", True),
    ],
    upward_imports: [
        (
            "lowlat/engine/a.py",
            "from lowlat.executors.make import x\nfrom lowlat.kernels.elementwise import norm",
            True,
        ),
        ("lowlat/engine/a.py", "from . import b\nfrom lowlat.text import TextCodec", True),
        ("lowlat/executors/a.py", "def f():\n    from lowlat.engine.runtime import Runtime", False),
        ("lowlat/executors/a.py", "from lowlat import host", False),
        ("lowlat/executors/a.py", "from lowlat import Runtime", False),
        ("lowlat/text/a.py", "import lowlat.models.geometry", False),
        ("lowlat/text/a.py", "from ..models import geometry", False),
        ("lowlat/cli/a.py", "from lowlat import __version__", True),
        ("lowlat/elsewhere/a.py", "", False),
    ],
    upward_in_engine: [
        ("lowlat/engine/steps/a.py", "from lowlat.engine.mailbox.mailbox import Mailbox\nfrom . import b", True),
        ("lowlat/engine/calls/a.py", "if TYPE_CHECKING:\n    from lowlat.engine.runtime import Runtime", True),
        ("lowlat/engine/loading/a.py", "def f():\n    from lowlat.engine.steps import steps", False),
        ("lowlat/engine/mailbox/a.py", "from lowlat.engine import runtime", False),
        ("lowlat/engine/elsewhere.py", "", False),
    ],
}


@pytest.mark.parametrize(
    ("check", "path", "source", "clean"), [(check, *case) for check, cases in IMPORT_CASES.items() for case in cases]
)
def test_checks_of_imports_see_what_they_must(
    check: Callable[[Module], Iterator[str]], path: str, source: str, clean: bool
) -> None:
    assert (not list(check(Module(Path(path), source, ast.parse(source))))) == clean


def test_no_folder_of_lowlat_imports_one_above_it(modules: list[Module]) -> None:
    own = [module for module in modules if module.folder == "lowlat" and module.path != Path("lowlat/__init__.py")]
    faults = [fault for module in own for fault in upward_imports(module)]
    assert not faults, "\n".join(faults)


def test_no_part_of_the_engine_imports_one_above_it(modules: list[Module]) -> None:
    own = [module for module in modules if module.path.parts[:2] == ("lowlat", "engine")]
    faults = [fault for module in own for fault in upward_in_engine(module)]
    assert {module.path.parts[2].removesuffix(".py") for module in own} == {*ENGINE, "__init__"}
    assert not faults, "\n".join(faults)


def test_gpu_libraries_are_imported_where_they_belong(modules: list[Module]) -> None:
    faults = [fault for module in modules for fault in gpu_import_faults(module)]
    assert not faults, "\n".join(faults)


@pytest.mark.second
def test_a_machine_without_a_gpu_loads_no_compiler() -> None:
    code = (
        "import sys, lowlat.engine.runtime, lowlat.cli, lowlat.executors.make\n"
        "print({'numba', 'llvmlite'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stdout + done.stderr


def test_every_module_has_a_docstring(modules: list[Module]) -> None:
    lacking = [str(module.path) for module in modules if not ast.get_docstring(module.tree)]
    assert not lacking, f"no docstring: {lacking}"


def test_no_assert_and_no_bare_except(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        for node in walked(module.tree):
            if isinstance(node, ast.Assert):
                wrong.append(f"{module.path}:{node.lineno}: assert; raise an error of lowlat.errors")
            elif isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{module.path}:{node.lineno}: bare except")
    assert not wrong, "\n".join(wrong)


def faults_of_all(module: Module) -> Iterator[str]:
    """Import a module and list the faults of its `__all__`."""
    try:
        loaded = importlib.import_module(module.name)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in BENCH_ONLY:
            yield f"{module.name} does not import: {error}"
        return
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [node.name for node in module.tree.body if isinstance(node, definitions) and node.name[0] != "_"]
    if public and not hasattr(loaded, "__all__"):
        yield f"{module.name} defines {public[0]} and has no __all__"
    entries = list(getattr(loaded, "__all__", []))
    if len(entries) != len(set(entries)):
        yield f"{module.name}.__all__ repeats a name"
    for entry in entries:
        try:
            getattr(loaded, entry)
        except (AttributeError, ImportError) as error:
            yield f"{module.name}.__all__ names {entry}: {error}"


def test_all_of_every_public_module_resolves(modules: list[Module]) -> None:
    public = [module for module in modules if not any(part.startswith("_") for part in module.name.split("."))]
    wrong = [fault for module in public for fault in faults_of_all(module)]
    assert not wrong, "\n".join(wrong)


def test_files_that_are_known_to_take_long_are_there(repository: Path) -> None:
    assert LONGEST and all((repository / "tests" / name).is_file() for name in LONGEST)


def test_top_level_holds_what_the_design_names(tree_files: list[Path]) -> None:
    extra = {path.parts[0] for path in tree_files} - TOP_LEVEL
    assert not extra, f"not part of the layout: {sorted(extra)}"


@pytest.mark.second
def test_tests_of_a_gpu_can_be_imported_without_one(repository: Path) -> None:
    """Where there is none they are left out of a run that does not name them."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
