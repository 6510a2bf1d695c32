"""Options that bind an answer to a grammar, on the command line."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from lowlat.cli.options import sampling_options, sampling_params

SCHEMA = {"type": "object", "properties": {"é": {"const": 'q"'}}}


def test_grammars_come_from_files_and_flags(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    @click.command()
    @sampling_options
    def command(**values: Any) -> None:
        found.update(vars(sampling_params(values)))

    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    command.main(["--json-schema", str(file)], standalone_mode=False)
    assert found["json_schema"] == json.dumps(SCHEMA)
    command.main(["--choice", "a", "--choice", "b"], standalone_mode=False)
    assert found["choice"] == ("a", "b") and found["json_schema"] is None
    command.main(["--json-object"], standalone_mode=False)
    assert found["json_object"] is True
    for wrong, words in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(click.BadParameter, match=words):
            command.main(["--grammar", str(wrong)], standalone_mode=False)
    file.write_bytes(b"\xff")
    with pytest.raises(click.BadParameter, match="not UTF-8: byte 0"):
        command.main(["--grammar", str(file)], standalone_mode=False)
