"""This module writes the help of commands: `--help` has common options on two screens, `--help-all` has every option.

Options that a record declares are in the section of the record. Options that `--help` leaves out have flags, too; rare
ones are set by --set name=value.
"""

import re
from collections.abc import Sequence
from typing import Any

import click

from lowlat.options.declaration import Option

__all__ = ["COMMON", "DeclaredOption", "SectionedCommand", "SectionedGroup"]

# the declared options that `--help` explains, by key
COMMON = frozenset(
    {
        *("endpoint", "http", "curve_keys", "model", "name", "max_queue", "drain_s"),
        *("head", "method", "num_speculative_tokens"),
        *("max_batch", "max_context", "device", "tensor_parallel_size", "dtype", "quantize", "kv_cache_dtype"),
        "kv_cache_gib",
        *("temperature", "top_p", "seed", "stop", "max_tokens", "json_schema"),
    }
)
OWN = "options"  # the section of a command's own options
ALL = "lowlat.cli.help_all"  # in a context's meta
MANY_CHOICES = 12  # choices with more characters are listed in the help's text
BRIEF_COLUMN = 22  # width of the first column of `--help`
COLUMN = 30
WHOLE = 1000  # more characters than any sentence of help
_CLAUSE = re.compile(r"(?<=[.;]) ")


class DeclaredOption(click.Option):
    """The flag of a declared option: the help may explain it, leave it out, or say how it is set instead.

    declared  the option
    section   the section of the help in which it stands
    value     how its value is named after `--set name=`
    """

    def __init__(self, *args: Any, declared: Option, section: str, value: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.declared, self.section, self.value = declared, section or OWN, value

    @property
    def is_common(self) -> bool:
        """Whether `--help` explains it."""
        return self.declared.key in COMMON and not self.declared.rare

    def brief_record(self, ctx: click.Context) -> tuple[str, str]:
        """The flag by one name, and the text of its help; choices that are many stand in the text."""
        option = self.declared
        metavar, text = "" if self.is_flag else f" {self.make_metavar(ctx)}", self.help or ""
        if option.choices and len(metavar) > MANY_CHOICES:
            metavar, text = " NAME", f"{_clauses(option.help)[0].rstrip('.;:')}: {', '.join(option.choices)}."
        return (*option.flags, option.flag)[0] + metavar, text

    def rare_record(self) -> tuple[str, str]:
        """How it is given after --set, and all that is said about it."""
        return f"{self.declared.key}={self.value}", self.help or ""


class SectionedCommand(click.Command):
    """A command whose help has sections: of its own options, and of the records whose options it takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
        self.params.append(click.Option(["--help-all"], **names, help="Show every option, and all about it."))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each record, after that of the command's own options."""
        sections: dict[str, list[DeclaredOption]] = {}
        own = []
        for each in self.get_params(ctx):
            if isinstance(each, DeclaredOption):
                sections.setdefault(each.section, []).append(each)
            elif isinstance(each, click.Option):
                own.append(each)
        rows = [record for each in own if (record := each.get_help_record(ctx)) is not None]
        if ctx.meta.get(ALL, False):
            _write(formatter, OWN, rows)
            for title, options in sections.items():
                shown = [each.get_help_record(ctx) for each in options]
                _write(formatter, title, [record for record in shown if record is not None])
                rare = [each.rare_record() for each in options if each.hidden]
                _write(formatter, f"{title}, by --set or in a file", rare)
        else:
            _write(formatter, OWN, [_brief_record(each, ctx) for each in own if not each.hidden], brief=True)
            for title, options in sections.items():
                _write(formatter, title, [each.brief_record(ctx) for each in options if each.is_common], brief=True)
            left = {title: sum(not each.is_common for each in options) for title, options in sections.items()}
            if any(left.values()):
                counted = ", ".join(f"{title} {count}" for title, count in left.items() if count)
                formatter.write_paragraph()
                formatter.write_text(f"More options ({counted}): `{ctx.command_path} --help-all`.")


class SectionedGroup(click.Group):
    """A group whose help has the whole first sentence of each command's."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, each) for name, each in found if each is not None and not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(WHOLE)) for name, each in shown])


def _brief_record(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    """A row of a command's own option: by one name where several would not fit."""
    names, text = option.get_help_record(ctx) or ("", "")
    if len(names) > BRIEF_COLUMN:
        names = option.opts[0] + ("" if option.is_flag else f" {option.make_metavar(ctx)}")
    return names, text


def _show_all(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _write(
    formatter: click.HelpFormatter, title: str, records: Sequence[tuple[str, str]], *, brief: bool = False
) -> None:
    """Write a section if it has rows; brief: only as much of each text as fits into one line, at least a clause."""
    if not records:
        return
    if brief:
        width = formatter.width - 2 * formatter.indent_increment - BRIEF_COLUMN
        records = [(name.ljust(BRIEF_COLUMN), _fitting(text, width)) for name, text in records]
    with formatter.section(title[:1].upper() + title[1:]):
        formatter.write_dl(records, col_max=BRIEF_COLUMN if brief else COLUMN)


def _clauses(text: str) -> list[str]:
    return _CLAUSE.split(text)


def _fitting(text: str, width: int) -> str:
    """Return the first clauses of a text that fit into a width, and its default if that fits, too."""
    text, bracket, default = text.partition("  [")
    if text.startswith("["):
        return text
    shown, *more = _clauses(text)
    for clause in more:
        if len(shown) + 1 + len(clause) > width:
            break
        shown += " " + clause
    shown = shown.rstrip(";:,") + ("" if shown.endswith(".") else ".")
    whole = shown + bracket + default
    return whole if len(whole) <= width else shown
