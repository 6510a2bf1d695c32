"""The pages that come from code: the API from docstrings, and the commands from their options.

A docstring says what it describes in lines of a name, two spaces or more, and a text; these become definitions.
"""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import click

from lowlat.cli import cli
from lowlat.cli.help import ALL

__all__ = ["API", "command_lines", "reformatted", "write_api", "write_commands"]

# what users import, by module, in the order of the page
CLIENTS = ("AsyncClient", "Client", "ClientCurve", "Limits", "PromptLogprobs", "Server")
API: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "lowlat": ("The runtime, its records and errors.", None),
    "lowlat.ipc": ("Clients of a server in another process, and the server itself.", CLIENTS),
    "lowlat.text": ("Tokenizers, chat templates, and answers taken apart.", None),
}
ENTRY = re.compile(r"^(\S(?:.*?\S)??) {2,}(\S.*)$")
CODE = re.compile(r"`+([^`]+)`+")


def reformatted(lines: Sequence[str]) -> list[str]:
    """A docstring's lines in reStructuredText."""
    found: list[str] = []
    for paragraph in _paragraphs(lines):
        if all(line.startswith("    ") for line in paragraph) and not any(
            ENTRY.match(line.strip()) for line in paragraph
        ):
            found += ["::", "", *paragraph, ""]
        else:
            found += [*_entries(paragraph), ""]
    return found


def _paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _entries(paragraph: Sequence[str]) -> Iterator[str]:
    """Text as it runs, and entries as definitions, with the lines that go on with them."""
    indent = min(len(line) - len(line.lstrip()) for line in paragraph)
    within = was_text = False
    for line in paragraph:
        entry = ENTRY.match(line[indent:])
        if entry is not None:
            if was_text:
                yield ""
            name = entry[1].replace("`", "")
            yield from (f"``{name}``", f"    {_escaped(entry[2])}")
        elif within and line[indent:].startswith(" "):
            yield f"    {_escaped(line.strip())}"
            continue
        else:
            if within:
                yield ""
            yield _escaped(line.strip())
        within, was_text = entry is not None, entry is None


def _escaped(text: str) -> str:
    """Text with its code marked, and nothing else that reStructuredText would read."""
    pieces = CODE.split(text)
    for number, piece in enumerate(pieces):
        pieces[number] = f"\\ ``{piece}``\\ " if number % 2 else re.sub(r"([\\*|_])", r"\\\1", piece)
    return "".join(pieces).strip() if len(pieces) > 1 else pieces[0]


def write_api(folder: Path) -> None:
    """Write the page of the API: every public name with its docstring."""
    parts = ["API", "===", ""]
    for name, (says, names) in API.items():
        module = import_module(name)
        parts += [name, "-" * len(name), "", says, ""]
        for public in names or sorted(module.__all__):
            thing = getattr(module, public)
            if public.startswith("__"):
                continue
            kind = "autoclass" if isinstance(thing, type) else "autofunction"
            members = [] if kind == "autofunction" or issubclass(thing, Exception) else ["   :members:"]
            if members and any(base.__module__.startswith("lowlat.") for base in thing.__bases__):
                members.append("   :inherited-members:")
            parts += [f".. {kind}:: {name}.{public}", *members, ""]
    (folder / "api.rst").write_text("\n".join(parts), encoding="utf-8")


def command_lines(group: click.Group = cli, words: str = "lowlat") -> Iterator[tuple[str, click.Command]]:
    """Every command with its words, groups before what is in them."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if command is None or command.hidden:
            continue
        yield f"{words} {name}", command
        if isinstance(command, click.Group):
            yield from command_lines(command, f"{words} {name}")


def write_commands(folder: Path) -> None:
    """Write the page of the commands, each with all of its options."""
    parts = ["# Commands\n", "Each command with all options, as `--help-all` shows them.\n"]
    for words, command in command_lines():
        context = click.Context(command, info_name=words)
        context.meta[ALL] = True
        parts.append(f"## {words}\n\n```text\n{command.get_help(context).strip()}\n```\n")
    (folder / "commands.md").write_text("\n".join(parts), encoding="utf-8")
