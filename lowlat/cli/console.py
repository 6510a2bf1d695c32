"""This module writes the output of commands: results to stdout, all else to stderr, colours and bars to terminals only.

It imports rich when it draws a table or a bar.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from lowlat.errors import ConfigError

__all__ = [
    "check_json_file",
    "format_bytes",
    "loading_bar",
    "log_to_stderr",
    "prefill_line",
    "print_error_json",
    "print_json",
    "print_table",
    "progress_bar",
    "stream_text",
    "want_json",
    "write_json",
]

Update = Callable[[int, int | None], None]  # done, total
JSON_WANTED = "lowlat.cli.json_wanted"  # in a context's meta: stdout must get a JSON object, and has none yet
PIPE_WIDTH = 1000  # without a terminal a table is never cut


class _StderrHandler(logging.Handler):
    """Writes the package's log to stderr; a line is not repeated, except in traces."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._written: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a line."""
        line = record.getMessage()
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        if record.name != "lowlat.trace":
            if line in self._written:
                return
            self._written.add(line)
        print(line, file=sys.stderr)  # not click.echo: a progress bar only moves out of the way of sys.stderr


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Show the package's log on stderr while the context lasts."""
    logger, handler = logging.getLogger("lowlat"), _StderrHandler()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def print_json(value: object) -> None:
    """Write one JSON object as one line of ASCII on stdout. Raises ValueError for NaN and infinities."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta.pop(JSON_WANTED, None)
    click.echo(json.dumps(value, allow_nan=False))


def want_json(context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Note that stdout gets JSON, so that a failing command writes its error there, too; the callback of --json."""
    if value in (True, "-"):
        context.meta[JSON_WANTED] = True
    return value


def print_error_json(message: str) -> None:
    """Write `{"error": message}` if stdout gets JSON and has none yet."""
    if click.get_current_context().meta.get(JSON_WANTED):
        with suppress(OSError):  # stderr and the exit code report the error
            print_json({"error": message})


def check_json_file(file: str | None) -> None:
    """Raise ConfigError for a file that `write_json` could not write; call this before measuring."""
    if file is None or file == "-":
        return
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir():
        problem = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ConfigError(f"{file} cannot be written: {problem}; name a file after --json")


def write_json(file: str, value: object) -> None:
    """Write one JSON object to a file, or to stdout for `-`. Raises ConfigError, and what `print_json` does."""
    if file == "-":
        print_json(value)
        return
    try:
        Path(file).write_text(json.dumps(value, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error


def stream_text(text: str, **style: Any) -> None:
    """Write text to stdout at once; on a terminal with a style (see `click.style`), and without control characters.

    A model's text could contain escape sequences for the terminal. A pipe or file gets the text unchanged.
    """
    if sys.stdout.isatty():
        safe = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        text = click.style(safe, **style) if style else safe
    click.echo(text, nl=False, color=True)  # True: write the text's bytes unchanged
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a table to stdout, with numbers aligned to the right; to a pipe in full width, without styles."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows]
        numeric = bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_shown(cell)) for cell in row))
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(file=sys.stdout, highlight=False, width=width)
    console.print(Text(title, style="bold"))
    console.print(table)


def _shown(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def format_bytes(count: int) -> str:
    """Return bytes in the largest binary unit that gives at least 1: 1536 is `1.50 KiB`."""
    if count < 1024:
        return f"{count} B"
    value = count / 1024
    for unit in ("KiB", "MiB"):
        if value < 1024:
            return f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


@contextmanager
def progress_bar(description: str, *, as_bytes: bool = False) -> Iterator[Update | None]:
    """Show a bar on stderr that vanishes at the end; yields its update(done, total), or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    counts = [bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn()] if as_bytes else []
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        *(counts or [bars.MofNCompleteColumn()]),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None)

        def update(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield update


@contextmanager
def loading_bar(description: str) -> Iterator[Update | None]:
    """Show a bar in bytes, for the progress callback of `Runtime.load`."""
    with progress_bar(description, as_bytes=True) as update:
        yield update


def prefill_line(prefill: Mapping[str, int]) -> str:
    """Return a text that says how much of a prompt is read at once.

    prefill  `chunk`, `max_chunks` and `max_positions` of a report
    """
    return (
        f"prompts are read {prefill['max_positions']:,} positions at once at most, {prefill['max_chunks']} chunks of "
        f"{prefill['chunk']} (max_prefill_chunks)"
    )
