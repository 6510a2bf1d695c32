"""The page about requests that wait and prompts that grow: its blocks run, one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    names: dict[str, Any] = {}
    blocks = BLOCK.findall((repository / "lowlat" / "engine" / "README.md").read_text())
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
