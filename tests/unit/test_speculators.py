"""The interface of speculators: who knows it, who knows an implementation, and a third one put into the table."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from recording import run_one
from tiny_models import make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.graphs import BufferSpec, Role
from lowlat.graphs.program import Stage
from lowlat.models.geometry import ModelConfig
from lowlat.options import config as options_module
from lowlat.speculators import methods
from lowlat.speculators.base import LoadedSpeculator, PrefillScope, Speculator, StateSizes, StepScope

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
IMPLEMENTATIONS = tuple(
    f"lowlat.speculators.{name}" for name in ("dflash", "dspark", "eagle3", "ngram", "peagle", "suffix")
)
BUILDS_ON: dict[str, set[str]] = {
    "lowlat.speculators.dflash": {"lowlat.speculators.eagle3"},
    "lowlat.speculators.dspark": {"lowlat.speculators.dflash", "lowlat.speculators.eagle3"},
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


@dataclass(frozen=True)
class Periodic(Speculator):
    """Drafts by n-grams of one token, keeps a feature by slot, and has a part in prefill and after acceptance."""

    method: ClassVar[str] = "periodic"

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig) -> Self:
        return cls()

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig) -> LoadedSpeculator:
        return LoadedSpeculator(cls(), {})

    def state_specs(self, sizes: StateSizes) -> list[BufferSpec]:
        return [BufferSpec("periodic.feature", (1, 32), sizes.dtype, Role.STATE)]

    def emit_prefill(self, scope: PrefillScope) -> None:
        out = scope.builder.scratch("periodic.features", (scope.size, 32), scope.dtype)
        reads = {"source0": scope.boundaries[-1]}
        scope.builder.emit("join_features", Stage.PREFILL, reads=reads, writes={"out": out})

    def emit_extend(self, scope: StepScope) -> tuple[str, ...]:
        out = scope.builder.scratch("periodic.last", (scope.bucket.batch, 32), scope.dtype)
        reads = {"x": scope.boundaries[-1], "commit_lens": "commit_lens"}
        scope.builder.emit("take_last", Stage.DRAFT, reads=reads, writes={"out": out})
        return (out,)

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        assert extended == ("periodic.last",)
        nodes, names = scope.draft_nodes(), ("tokens", "slots", "draft_live", "draft_lens")
        reads, writes = {name: name for name in names}, {"draft_nodes": nodes}
        scope.builder.emit("ngram_draft", Stage.DRAFT, reads=reads, writes=writes, min_match=1, max_match=1)
        return nodes


def test_a_third_method_needs_a_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name among the options: nothing else knows it, and it changes no token."""
    monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, "periodic": Periodic})
    monkeypatch.setitem(options_module.METHOD_OPTIONS, "periodic", ())
    make_target(tmp_path, "qwen3", gain=0.3, num_hidden_layers=2)
    prompt, sampling = [4, 5, 6] * 6, SamplingParams(max_tokens=30, temperature=0.5, seed=3)
    with Runtime.load(tmp_path, **OPTIONS) as runtime:
        expected = run_one(runtime, prompt, sampling)
        assert "speculator" not in runtime.summary()
    config = SpeculativeConfig(method="periodic", num_speculative_tokens=3)
    with Runtime.load(tmp_path, config, **OPTIONS) as runtime:
        for depth in (None, 0, 1, 7):
            assert run_one(runtime, prompt, sampling, depth) == expected
        assert runtime.executor.state["periodic.feature"].shape == (1, 32)
        summary = runtime.summary()
        assert summary["speculator"] == {"method": "periodic"}
        assert summary["eagle_speculation"]["total_accepted_tokens"] > 0
