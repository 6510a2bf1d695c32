"""What the pages write can be done: blocks run or are parsed, commands in the text are those of the programs.

A block that needs neither a GPU, a network nor minutes runs: here, or in the test that stands next to it in `RUN_BY`.
"""

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from benches import docs
from cli_calls import lowlat
from written_commands import WrongCommandError, check_command, check_option, commands_of, shell_lines

outside_code, PAGES = docs("assembly").outside_code, docs("pages").PAGES
ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
FILES = sorted({part.file for page in PAGES for part in page.parts})
BLOCKS = [(file, *block) for file in FILES for block in BLOCK.findall((ROOT / file).read_text(encoding="utf-8"))]
LINES = [(file, line) for file, language, body in BLOCKS if language in ("", "sh") for line in shell_lines(body)]

# the tests that run a page's blocks of a language
RUN_BY = {
    ("README.md", "python"): "tests/unit/test_readmes.py",
    ("lowlat/USING.md", "python"): "tests/unit/test_readmes.py",
    ("lowlat/SESSIONS.md", "python"): "tests/unit/test_readmes.py",
    ("lowlat/engine/REQUESTS.md", "python"): "tests/unit/engine/test_waiting_page.py",
    ("lowlat/serving/models/README.md", "python"): "tests/unit/test_served_models.py",
    ("lowlat/serving/models/README.md", "toml"): "tests/unit/test_served_models.py",
    ("lowlat/serving/http/GROWING.md", "python"): "tests/http/test_growing.py",
    ("ipc/README.md", "python"): "tests/ipc/test_readme.py",
    ("ipc/README.md", "toml"): "tests/ipc/test_readme.py",
    ("ipc/WIRE.md", "python"): "tests/ipc/test_readme.py",
}
# commands that run elsewhere, and why others do not run: by a pattern
ELSEWHERE = {
    r"lowlat (serve|generate --endpoint|top|sleep|wake)|lowlat chat --max|curl|export": "tests/ipc, tests/http",
    r"lowlat inspect step llama-8b": "tests/unit/cli/test_cli_inspect_step.py",
    r"lowlat bench": "tests/unit/cli/test_cli_bench.py",
    r"lowlat doctor --exactness$|lowlat doctor --fidelity": "tests/unit/cli/test_cli_doctor.py",
    r"python3 -m venv|\S*pip |pip wheel": ".ci/run and tests/unit/test_packaging.py",
}
NEEDS = {
    r".*(Qwen/|RedHatAI/|ORG/NAME)": "a network",
    r".*(MODEL|TARGET|DIR)\b": "a model that is not there",
    r"\S*python -m (bench|pytest)": "a GPU, or minutes; tests/unit/test_bench_programs.py runs what these share",
}
HERE = {
    'lowlat generate --choice yes --choice no --prompt "Shall the President be commander in chief?"': r"(yes|no)\s*",
}
OBJECTS = {
    name: getattr(importlib.import_module(module), name)
    for module, names in {
        "lowlat": ("Runtime", "SamplingParams", "SpeculativeConfig", "RuntimeConfig", "Session", "RequestMetrics"),
        "lowlat.ipc": ("Client", "AsyncClient"),
    }.items()
    for name in names
}
OBJECTS |= {"runtime": OBJECTS["Runtime"], "session": OBJECTS["Session"], "client": OBJECTS["Client"]}


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 40 and len(BLOCKS) > 40 and len(LINES) > 40


@pytest.mark.parametrize(("file", "language"), sorted({(file, language) for file, language, _ in BLOCKS}))
def test_blocks_of_a_language_have_a_test(file: str, language: str) -> None:
    bodies = [body for name, each, body in BLOCKS if (name, each) == (file, language)]
    if language == "python":
        for body in bodies:
            ast.parse(body)
    if language in ("python", "toml") and not file.startswith("kernels/"):  # there they show a definition's form
        folder = Path(file).parent.name if file.endswith("README.md") else ""
        name = "USING" if file == "README.md" else folder or Path(file).stem
        assert name in (ROOT / RUN_BY[file, language]).read_text()
    assert language in ("", "sh", "python", "toml", "mermaid", "json"), f"{file}: a block of {language!r} has no test"


@pytest.mark.parametrize("line", sorted({line for _, line in LINES}))
def test_a_command_of_a_block_is_one(line: str) -> None:
    for words in commands_of(line):
        check_command(words)
    reasons = [why for table in (ELSEWHERE, NEEDS) for pattern, why in table.items() if re.match(pattern, line)]
    assert reasons or line in HERE or line.startswith(("echo", "serve run"))


@pytest.mark.second
@pytest.mark.parametrize("line", HERE)
def test_a_command_that_needs_nothing_runs(line: str) -> None:
    done = lowlat(*shlex.split(line)[1:])
    assert done.exit_code == 0 and re.fullmatch(HERE[line], done.stdout), done.stderr


def spans(file: str) -> list[str]:
    """Code within a page's text."""
    text = "".join(piece for piece, is_text in outside_code((ROOT / file).read_text(encoding="utf-8")) if is_text)
    return [" ".join(each.split()) for each in SPAN.findall(text)]


@pytest.mark.parametrize("file", FILES)
def test_commands_and_names_in_the_text_are_there(file: str) -> None:
    wrong = []
    for span in spans(file):
        try:
            if re.match(r"(lowlat|python3?|pip|\.venv/bin/\w+) ", span):
                plain = re.sub(r"(\w)\|\w+", r"\1", re.sub(r"[\[\]](?!.*')", "", span))
                for words in commands_of(plain):
                    check_command(words, whole=False)
            elif re.match(r"--?[A-Za-z]", span):
                check_option(shlex.split(span))
            else:
                check_name(span)
        except (WrongCommandError, ValueError) as error:
            wrong.append(f"`{span}`: {error}")
    assert not wrong, "\n".join(wrong)


def check_name(span: str) -> None:
    """`Runtime.pause`, `runtime.generate(...)`, `lowlat.SamplingParams`: it is there. Raises WrongCommandError."""
    if span.startswith("client.key"):  # a file
        return
    found = re.match(r"(?:await )?(lowlat(?:\.\w+)+|(\w+)\.(\w+))", span)
    if found is None:
        return
    if found[1].startswith("lowlat."):
        resolve(found[1])
    elif found[2] in OBJECTS and not has(OBJECTS[found[2]], found[3]):
        raise WrongCommandError(f"{found[2]} has no {found[3]}")


def resolve(name: str) -> None:
    """Find a dotted name, of a module or in one."""
    parts = name.split(".")
    thing: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 1):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            try:
                thing = importlib.import_module(".".join(parts[: place + 1]))
            except ImportError as error:
                raise WrongCommandError(f"{name}: no such name") from error


def has(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute: of the class, or set by it."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("lowlat.")]
    pattern = rf"\b(self\.)?{name}\b ?[:=]"
    return hasattr(kind, name) or any(re.search(pattern, inspect.getsource(base)) for base in own)


@pytest.mark.parametrize(
    "line",
    [
        "lowlat serve --modle x",
        "lowlat bench run baseline --steps many",
        "lowlat inspect nothing --gpu",
        "lowlat chat --set no_such_option=3",
        "python -m bench.weights --geometry llama-8b",
        "python -m bench.none",
        "pip install -e '.[nothing]'",
        "pytest -m nothing",
        "lowlatt serve",
    ],
)
def test_wrong_commands_are_seen(line: str) -> None:
    with pytest.raises(WrongCommandError):
        for words in commands_of(line):
            check_command(words)


@pytest.mark.parametrize("span", ["Runtime.resumes", "lowlat.Sampling", "runtime.answer(text)"])
def test_wrong_names_are_seen(span: str) -> None:
    with pytest.raises(WrongCommandError):
        check_name(span)
    with pytest.raises(WrongCommandError):
        check_option(["--no-such-thing"])
