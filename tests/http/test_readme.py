"""The gateway's page lists every metric and every code of an error, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from lowlat.ipc.messages import Code
from lowlat.serving.http import metrics

FOLDER = Path(__file__).resolve().parents[2] / "lowlat" / "serving" / "http"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SPAN = re.compile(r"`([a-z0-9_]+)`")


def listed_metrics() -> Iterator[str]:
    """Names in the table; one that begins with an underscore goes on from the one before that does not."""
    for row in PAGE.split("## Metrics")[1].splitlines():
        base = ""
        for span in SPAN.findall(row.partition(" (a method")[0]):
            base = base if span.startswith("_") else span
            yield base + span if span.startswith("_") else span


def test_every_metric_is_listed() -> None:
    tables = [table for name, table in vars(metrics).items() if name.isupper() and isinstance(table, dict)]
    names = {name for table in tables for name, value in table.items() if isinstance(value, tuple)}
    names |= set(re.findall(r'\._(?:gauge|counter)\(\s*"(\w+)"', Path(metrics.__file__).read_text(encoding="utf-8")))
    assert len(names) > 50
    listed = {name.removesuffix("_total") for name in listed_metrics()}
    assert listed - {"spec_decode_num", "structured_output"} == names


def codes(tree: ast.AST) -> Iterator[str]:
    """The texts that calls have as their `code`."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for keyword in call.keywords:
            value = keyword.value if keyword.arg == "code" else None
            choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else getattr(value, "values", [value])
            yield from (
                each.value for each in choices if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def test_every_code_of_an_error_is_listed() -> None:
    files = [file for file in FOLDER.rglob("*.py") if "page" not in file.parts]
    own = {code for file in files for code in codes(ast.parse(file.read_text(encoding="utf-8")))}
    assert {"json", "model_loading", "gone"} <= own
    listed = set(SPAN.findall(PAGE.split("The codes of errors are")[1].split(").")[0]))
    assert own - listed == set()
    assert listed - own <= {"not_found", "method_not_allowed", *get_args(Code)}
