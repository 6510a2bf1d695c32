"""Running an example of a page in the tests' own process, where torch is imported already."""

import contextlib
import io
import sys
from pathlib import Path

__all__ = ["run_example"]


def run_example(code: str, folder: Path) -> str:
    """Run a program in a folder as a user would, in a module of its own; returns what it prints."""
    said = io.StringIO()
    module = type(sys)("__main__")
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        exec(compile(code, "an example of a page", "exec"), module.__dict__)  # noqa: S102  # the pages' own
    return said.getvalue()
