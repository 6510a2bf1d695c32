"""A type checker's view of lowlat outside its checkout: names, types and errors in a user's program."""

import ast
import importlib
import json
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest

NEEDS_PYRIGHT = pytest.mark.skipif(find_spec("basedpyright") is None, reason="needs the extra `test`")
LAZY = ("lowlat", "lowlat.ipc", "lowlat.ipc.client")
PROGRAM = """
import lowlat
from lowlat import Runtime
from lowlat.ipc import AsyncClient, Client

runtime = lowlat.Runtime.load("model", speculative=lowlat.SpeculativeConfig(method="ngram"), max_batch=2)
reveal_type(runtime)
reveal_type(Runtime.submit(runtime, [1, 2], lowlat.SamplingParams(max_tokens=3)))
for output in runtime.step():
    reveal_type(output)
    reveal_type(output.error_code)
reveal_type(runtime.metrics("name"))
answer = runtime.generate("Once", max_tokens=3, choice=["yes"], stop={"a", "b"})
reveal_type(answer)
reveal_type(runtime.chat([{"role": "user", "content": "Hi"}], tools=[{"type": "function"}]).tool_calls[0].values())
for piece in runtime.stream([1, 2], lowlat.SamplingParams(choice=["yes"], stop_token_ids=[1])):
    reveal_type(piece.text)
reveal_type(lowlat.SamplingParams(stop="x").stop)
lowlat.SpeculativeConfig("draft", num_speculative_tokens="auto", capture_layers=[1, 2])
async def main() -> None:
    reveal_type(await runtime.agenerate("Once", temperature=0.5))
    async for piece in runtime.astream("Once"):
        reveal_type(piece)
with Client() as client:
    for chunk in client.generate("text", max_tokens=3):
        reveal_type(chunk)
reveal_type(AsyncClient())
lowlat.Runtme
lowlat.SamplingParams(max_tokens="three")
runtime.generate("Once", max_token=3)
lowlat.Runtime.load("model", max_bach=2)
"""
REVEALED = (
    "lowlat.engine.runtime.Runtime",
    "str",
    "lowlat.options.request.StepOutput",
    "not_finite",
    "lowlat.engine.metrics.RequestMetrics",
    "lowlat.ipc.answer.Answer",
    "dict[str",
    "str",
    "tuple[str, ...]",
    "lowlat.ipc.answer.Answer",
    "lowlat.ipc.chunk.Chunk",
    "lowlat.ipc.chunk.Chunk",
    "lowlat.ipc.client.asynchronous.AsyncClient",
)


@pytest.mark.parametrize("name", LAZY)
def test_names_that_are_resolved_lazily_are_named_for_type_checkers(name: str) -> None:
    """As it is found, and from where; `__getattr__` is hidden from checkers, so that a wrong name is an error."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    body = ast.parse(Path(module.__file__).read_text()).body
    checks = [node for node in body if isinstance(node, ast.If)]
    (seen,) = (node for node in checks if ast.unparse(node.test) == "TYPE_CHECKING")
    (hidden,) = (node for node in checks if ast.unparse(node.test) == "not TYPE_CHECKING")
    assert [node.name for node in hidden.body if isinstance(node, ast.FunctionDef)] == ["__getattr__"]
    plain = {node for node in body if isinstance(node, ast.ImportFrom)}
    imported: dict[str, str] = {}
    for node in (*seen.body, *plain):
        assert isinstance(node, ast.ImportFrom) and node.module is not None
        imported |= {alias.name: node.module for alias in node.names}
    for public in module.__all__:
        found = getattr(module, public)
        if public == "__version__":
            continue
        assert found is getattr(importlib.import_module(imported[public]), public)
    assert set(module.__all__) <= {*dir(module)}
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Runtme'"):
        module.Runtme  # noqa: B018


def test_the_version_is_the_distributions() -> None:
    assert importlib.import_module("lowlat").__version__ == metadata.version("lowlat")


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_mypy_knows_the_types_of_a_users_program(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(PROGRAM)
    # large libraries that none of these names is made of
    (tmp_path / "mypy.ini").write_text("[mypy-torch.*,numpy.*,numba.*,transformers.*]\nfollow_imports = skip\n")
    lines = run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "user.py"], tmp_path).splitlines()
    revealed = [line for line in lines if "Revealed type" in line]
    errors = [line for line in lines if "error:" in line]
    assert len(revealed) == len(REVEALED), "\n".join(lines)
    for line, expected in zip(revealed, REVEALED, strict=True):
        assert expected in line and ("Any" not in line or expected == "dict[str")
    wrong = ('"Runtme"', '"max_tokens"', '"max_token"', '"max_bach"')
    assert len(errors) == len(wrong) and all(name in line for name, line in zip(wrong, errors, strict=True)), errors


def checked_by_pyright(program: str, folder: Path) -> list[str]:
    """The words of pyright, in the build that wheels ship, on a user's program, in order of its lines."""
    (folder / "user.py").write_text(program)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "user.py"]
    report = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600).stdout)
    told = sorted(report["generalDiagnostics"], key=lambda each: int(each["range"]["start"]["line"]))
    return [each["message"] for each in told]


@pytest.mark.second
@NEEDS_PYRIGHT
def test_pyright_knows_the_types_of_a_users_program(tmp_path: Path) -> None:
    told = checked_by_pyright(PROGRAM, tmp_path)
    revealed = [each for each in told if each.startswith("Type of")]
    assert len(revealed) == len(REVEALED), told
    for message, expected in zip(revealed, REVEALED, strict=True):
        assert expected.rpartition(".")[2] in message and "Unknown" not in message
    errors = [each for each in told if not each.startswith("Type of")]
    wrong = (
        '"Runtme" is not a known attribute',
        "\"Literal['three']\"",
        'No parameter named "max_token"',
        '"max_bach"',
    )
    assert len(errors) == len(wrong) and all(part in each for part, each in zip(wrong, errors, strict=True)), errors


@pytest.mark.wide
@NEEDS_PYRIGHT
def test_pyright_knows_every_public_name(tmp_path: Path) -> None:
    """Modules' names, and the attributes of classes among them: none is of an unknown type."""
    names = [
        f"{module}.{name}" for module in ("lowlat", "lowlat.ipc") for name in importlib.import_module(module).__all__
    ]
    for name in list(names):
        found = attrgetter(name.removeprefix("lowlat."))(importlib.import_module("lowlat"))
        if isinstance(found, type):
            names += [f"{name}.{each}" for each in vars(found) if not each.startswith("_")]
    lines = ["import lowlat", "import lowlat.ipc", *(f"reveal_type({name})" for name in names)]
    told = checked_by_pyright("\n".join(lines), tmp_path)
    assert len(names) > 150 and len(told) == len(names), [each for each in told if not each.startswith("Type of")]
    assert not [each for each in told if "Unknown" in each]
