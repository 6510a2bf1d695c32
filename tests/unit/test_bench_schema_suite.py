"""The program that runs JSON-Schema-Test-Suite counts what is served, refused and wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from benches import bench

from lowlat.text.grammar import compiler

schema_suite = bench("schema_suite")


def test_schemas_are_counted_by_keyword(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case: dict[str, Any] = {"description": "years", "schema": {"type": "string", "format": "date"}}
    case["tests"] = [{"data": "2024-02-29", "valid": True}, {"data": "2023-02-29", "valid": False}]
    refused = {"description": "none", "schema": {"not": {"type": "string"}}, "tests": []}
    folder = tmp_path / "tests" / schema_suite.DRAFT
    folder.mkdir(parents=True)
    (folder / "dates.json").write_text(json.dumps([case, refused]))
    command = [str(tmp_path), "--suite-commit", "none", "--walks", "2", "--out", str(tmp_path / "x.json")]
    assert schema_suite.main(command) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    (row,) = result["rows"]
    assert row["keyword"] == "dates" and (row["served"], row["refused"], row["wrong"], row["walks"]) == (1, 1, 0, 2)
    assert (row["valid_allowed"], row["invalid_left_out"]) == (1, 1) and sum(result["refusals"].values()) == 1
    monkeypatch.setattr(compiler, "exact_text", lambda text: text)  # as the library has it
    case["schema"]["title"] = "not compiled yet"
    (folder / "dates.json").write_text(json.dumps([case]))
    assert schema_suite.main(command) == 1
    result = json.loads((tmp_path / "x.json").read_text())
    assert [fault["document"] for fault in result["faults"]] == ['"2023-02-29"']
