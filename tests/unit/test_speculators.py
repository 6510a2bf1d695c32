"""The interface of speculators: who knows it, and who knows an implementation."""

import ast
from pathlib import Path
from typing import Any

import pytest

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
IMPLEMENTATIONS = tuple(
    f"lowlat.speculators.{name}"
    for name in ("dflash", "draft_model", "dspark", "eagle3", "mtp", "ngram", "peagle", "suffix")
)
BUILDS_ON: dict[str, set[str]] = {
    "lowlat.speculators.dflash": {"lowlat.speculators.eagle3"},
    "lowlat.speculators.dspark": {"lowlat.speculators.dflash", "lowlat.speculators.eagle3"},
    "lowlat.speculators.mtp": {"lowlat.speculators.eagle3"},
    "lowlat.speculators.peagle": {"lowlat.speculators.eagle3"},
}
ABOVE = ("lowlat.step", "lowlat.executors", "lowlat.engine", "lowlat.serving", "lowlat.tools", "lowlat.cli")


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def below(names: set[str], *packages: str) -> set[str]:
    """The names that lie in one of the packages."""
    return {name for name in names if name.startswith(packages)}


@pytest.mark.parametrize(
    "folder", ["step", "engine", "executors", "lowering", "sequence", "serving", "options", "models"]
)
def test_nobody_but_the_table_knows_an_implementation(folder: str, repository: Path) -> None:
    files = list((repository / "lowlat" / folder).rglob("*.py"))
    assert files
    assert not {str(path): found for path in files if (found := below(imports_of(path), *IMPLEMENTATIONS))}


def test_speculators_know_nothing_above_them_and_not_each_other(repository: Path) -> None:
    folder = repository / "lowlat" / "speculators"
    for path in folder.rglob("*.py"):
        imported = imports_of(path)
        assert not below(imported, *ABOVE), path
        own = next((name for name in IMPLEMENTATIONS if path.parent.name == name.rpartition(".")[2]), None)
        if path.name != "methods.py":
            assert not below(imported, *({*IMPLEMENTATIONS} - {own} - BUILDS_ON.get(own or "", set()))), path
