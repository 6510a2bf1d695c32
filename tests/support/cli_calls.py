"""Running the command line in a test, and reading what it answered."""

import json
from typing import Any

from click.testing import CliRunner, Result

from lowlat.cli import cli


def lowlat(*arguments: object) -> Result:
    """Run the command line; it never lets an exception through."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The JSON object that is all of stdout."""
    result = lowlat(*arguments)
    assert result.exit_code == code, result.output
    (line,) = result.stdout.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def refusal(*arguments: object, code: int = 2) -> str:
    """Run a command that must be refused, and return its stderr."""
    result = lowlat(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())
