"""This module reports the failure of a command: a line on stderr, JSON on stdout with --json, and an exit code.

The line always begins with `error: `, for errors of options, models, servers and stdout alike.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import click

from lowlat.cli.familiar import meant_option
from lowlat.errors import ConfigError, LowlatError, RequestError

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "REFUSED",
    "Failure",
    "Refusal",
    "failure",
    "failures_told",
    "flush_output",
    "message_of",
]

FAILED = 1
REFUSED = 2
INTERRUPTED = 130


class Failure(click.ClickException):
    """A failure in words."""

    exit_code = FAILED


class Refusal(Failure):
    """A refusal of an option, a model directory or a request."""

    exit_code = REFUSED


def failure(error: Exception) -> Failure:
    """An error in words, with its exit code."""
    kind = Refusal if isinstance(error, (ConfigError, RequestError)) else Failure
    return kind(_described(error))


def message_of(error: click.ClickException) -> str:
    """Return the text of an error, without a full stop; for an unknown option it suggests the meant one."""
    if isinstance(error, click.NoSuchOption) and (meant := meant_option(error)) is not None:
        return f"No such option {error.option_name!r:.80}. Did you mean {meant!r}?"
    return error.format_message().removesuffix(".")


@contextmanager
def failures_told() -> Iterator[None]:
    """Report what a command raises, and end the process with the exit code."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _tell(f"error: {message_of(error)}{_where_to_read(error)}")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _tell("interrupted")
        sys.exit(INTERRUPTED)
    except OSError as error:  # an error of stdout; a command's own errors are failures by now
        _tell(f"error: {_described(error)}")
        sys.exit(FAILED)


def flush_output(stream: TextIO) -> None:
    """Flush a stream; output that a full disk or a closed pipe does not take is dropped.

    Exits with 1 if something was dropped; Python itself would print a traceback and exit with 120.
    """
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        if not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
            _tell(f"error: {_described(error)}")
        sys.exit(FAILED)


def _tell(line: str) -> None:
    try:
        click.echo(line, err=True)
    except OSError:
        return  # stderr itself cannot be written: the exit code is all that is left


def _described(error: Exception) -> str:
    if isinstance(error, LowlatError):
        return str(error)
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return f"the output cannot be written: {error.strerror}"
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}"
    return f"{type(error).__name__}: {error} (not expected; `lowlat --debug ...` shows where)"


def _where_to_read(error: click.ClickException) -> str:
    context: Any = getattr(error, "ctx", None)
    if not isinstance(error, click.UsageError) or context is None:
        return ""
    option = "--help-all" if error.message.startswith("--set") else "--help"
    return f"; `{context.command_path} {option}` says more"
