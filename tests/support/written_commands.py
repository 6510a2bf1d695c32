"""Commands as pages write them, taken apart and parsed by the programs' own parsers, without running one."""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import benches  # noqa: F401  bench/ and docs/ are found
import click
import pytest

from lowlat.cli import cli
from lowlat.cli.help import DeclaredOption

__all__ = ["WrongCommandError", "check_command", "check_option", "commands_of", "shell_lines"]

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = {"&&", "||", "|", ";", "&", "(", ")", "<", ">", ">>"}
# programs of others, whose arguments are theirs to check
OTHERS = frozenset(
    {
        "apt",
        "curl",
        "echo",
        "eval",
        "export",
        "mypy",
        "nsys",
        "openssl",
        "pre-commit",
        "ruff",
        "serve",
        "sudo",
        "ulimit",
    }
)
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_/@.-]*|N,N|\.\.\.")
NUMBERS = (click.types.IntParamType, click.types.FloatParamType, click.Choice)


class WrongCommandError(Exception):
    """A page has a command that its program would refuse."""


class _Parsed(BaseException):
    """A program has taken its arguments; it does nothing more."""


def shell_lines(block: str) -> Iterator[str]:
    """The commands of a block: of one with prompts those lines alone; what stands far behind a command explains it."""
    prompted = any(line.startswith("$ ") for line in block.splitlines())
    for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
        if prompted and not line.startswith("$ "):
            continue
        text = re.split(r"\s{3,}", line.removeprefix("$ ").strip())[0]
        if text and not text.startswith("#"):
            yield text


def commands_of(line: str) -> Iterator[list[str]]:
    """The simple commands of a line, each as words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in OPERATORS:
            if words:
                yield words
            words = []
        elif words or "=" not in word:  # variables before a command
            words.append(word)


def check_command(words: Sequence[str], *, whole: bool = True) -> None:
    """Parse a command. `whole`: it could be run as it is written. Raises WrongCommandError."""
    program, *arguments = words
    program = program.rpartition("/")[2]
    if program == "lowlat":
        _check_lowlat(arguments, whole=whole)
    elif program in ("python", "python3"):
        _check_python(arguments, whole=whole)
    elif program == "pip":
        _check_pip(arguments)
    elif program == "pytest":
        _check_pytest(arguments)
    elif program not in OTHERS:
        raise WrongCommandError(f"{program}: no program that pages name")


def check_option(words: Sequence[str]) -> None:
    """Find the options of a text that has no program, such as `-S auto`, in some program. Raises WrongCommandError."""
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--?[A-Za-z][\w-]*", name) and name not in known_options():
            raise WrongCommandError(f"{name}: no program has such an option")
        if words[0] == "--set" and not word.startswith("-") and name not in _keys():
            raise WrongCommandError(f"--set {name}: no such option")


def leaves(group: click.Group = cli) -> Iterator[click.Command]:
    """All commands of lowlat."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from leaves(command)
        elif command is not None:
            yield command


@cache
def known_options() -> frozenset[str]:
    """The options of lowlat's commands, and of the programs in bench/ and tests/."""
    own = {text for command in leaves() for each in command.params for text in (*each.opts, *each.secondary_opts)}
    files = [*ROOT.glob("bench/**/*.py"), *ROOT.glob("tests/support/*.py"), *ROOT.glob("tests/conftest.py")]
    programs = {name for file in files for name in re.findall(r'"(--[a-z][\w-]*)"', file.read_text())}
    return frozenset(own | programs | {"--help", "--help-all", "-m", "-n", "-lto"})  # pytest's, and the linker's


@cache
def _keys() -> frozenset[str]:
    return frozenset(
        each.declared.key for command in leaves() for each in command.params if isinstance(each, DeclaredOption)
    )


def _check_lowlat(words: Sequence[str], *, whole: bool) -> None:
    command: click.Command = cli
    context = click.Context(command, info_name="lowlat")
    rest = list(words)
    try:
        while isinstance(command, click.Group):
            if not rest or rest[0].startswith("-"):
                if whole and not rest and not command.invoke_without_command:
                    raise WrongCommandError(f"{command.name}: needs a command after it")
                break
            _, found, rest = command.resolve_command(context, rest)
            if found is None:
                raise WrongCommandError(f"{' '.join(words)}: no such command")
            command, context = found, click.Context(found, context, info_name=found.name)
        if "--help" in rest:
            return
        given, extra, _ = command.make_parser(context).parse_args(list(rest))
        _check_values(command, context, given, extra, whole=whole)
    except click.UsageError as error:
        raise WrongCommandError(f"lowlat {' '.join(words)}: {error.format_message()}") from error


def _check_values(
    command: click.Command, context: click.Context, given: dict[str, object], extra: Sequence[str], *, whole: bool
) -> None:
    if extra:
        raise click.UsageError(f"unexpected {' '.join(extra)}")
    for each in command.get_params(context):
        value = given.get(each.name or "")
        if value is None or value is click.core.UNSET:  # type: ignore[attr-defined]
            if whole and each.required:
                raise click.UsageError(f"{each.name} is missing")
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(each.type, NUMBERS) and isinstance(one, str) and not PLACEHOLDER.fullmatch(one):
                each.type(one, each, context)
            if each.name == "given" or "--set" in each.opts:
                name = str(one).partition("=")[0]
                if name not in _keys():
                    raise click.UsageError(f"--set {name}: no such option")


def _check_python(words: Sequence[str], *, whole: bool) -> None:
    """`-m MODULE` or a file, by the parser that it makes; the standard library's own modules are let pass."""
    if words[0] == "-m" and words[1] in ("venv", "pytest"):
        if words[1] == "pytest":
            _check_pytest(words[2:])
        return
    is_module = words[0] == "-m"
    name, arguments = words[int(is_module)], list(words[1 + int(is_module) :])
    if whole:
        _run_parser(name, arguments, is_module=is_module)
        return
    folder = ROOT / "src" if name.startswith("lowlat.") else ROOT
    place = folder / name.replace(".", "/") if is_module else folder / name
    files = (place, place.with_suffix(".py"), place / "__main__.py", place / "__init__.py")
    if not any(each.is_file() for each in files):
        raise WrongCommandError(f"{name}: no such program")
    check_option([word for word in arguments if word.startswith("--")] or [""])


def _run_parser(name: str, arguments: list[str], *, is_module: bool) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only(self: argparse.ArgumentParser, *given: Any, **options: Any) -> None:
        parse(self, *given, **options)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a module that is there already runs again
        patch.setattr(argparse.ArgumentParser, "parse_args", only)
        patch.setattr(sys, "argv", [name, *arguments])
        patch.chdir(ROOT)
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / name), run_name="__main__")
        except _Parsed:
            return
        except SystemExit as error:
            raise WrongCommandError(f"{name} {' '.join(arguments)}: ended with {error.code}") from error
        except ImportError as error:
            raise WrongCommandError(f"{name}: {error}") from error
    raise WrongCommandError(f"{name}: parsed nothing")


def _check_pip(words: Sequence[str]) -> None:
    """Files that are named lie there, and extras are the package's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            if unknown := set(extra.split(",")) - set(project["optional-dependencies"]):
                raise WrongCommandError(f"{word}: the package has no extra {', '.join(unknown)}")
        if (word.endswith(".txt") or word.startswith("./")) and not (ROOT / word).exists():
            raise WrongCommandError(f"{word}: no such file")


def _check_pytest(words: Sequence[str]) -> None:
    """Marks are those of the settings, and paths lie there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {text.partition(":")[0] for text in settings["markers"]}
    for option, word in zip(["", *words], words, strict=False):
        if option == "-m" and not set(re.findall(r"\w+", word)) - {"or", "and", "not"} <= marks:
            raise WrongCommandError(f"pytest -m {word}: no such mark")
        if "/" in word and option not in ("-o", "--serving-out") and not (ROOT / word).exists():
            raise WrongCommandError(f"pytest {word}: no such path")
