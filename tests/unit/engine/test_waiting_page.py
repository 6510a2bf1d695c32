"""The page about requests that wait and prompts that grow: its blocks run, one after the other."""

import re
import runpy
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.second
def test_the_blocks_run(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    blocks = BLOCK.findall((repository / "lowlat" / "engine" / "REQUESTS.md").read_text())
    assert len(blocks) == 4
    (tmp_path / "page.py").write_text("\n".join(blocks))
    runpy.run_path(str(tmp_path / "page.py"))
