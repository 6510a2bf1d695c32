"""This example is a speculator in one class: its state, and its operations in prefill, after acceptance, in drafting.

It needs an entry in the table of methods, and its name among the options. No other code knows it, and it changes no
token.
"""

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
from lowlat.options.method_options import METHOD_OPTIONS
from lowlat.speculators import methods
from lowlat.speculators.base import LoadedSpeculator, PrefillScope, Speculator, StateSizes, StepScope

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}


@dataclass(frozen=True)
class Periodic(Speculator):
    """Draft by n-grams of one token; keep a feature, and run an operation in prefill and one after acceptance."""

    method: ClassVar[str] = "periodic"

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        return cls()

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
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
        nodes, reads = scope.draft_nodes(), scope.reads("tokens", "slots", "draft_live", "draft_lens")
        writes = {"draft_nodes": nodes}
        scope.builder.emit("ngram_draft", Stage.DRAFT, reads=reads, writes=writes, min_match=1, max_match=1)
        return nodes


def test_a_third_method_needs_a_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it after a line in the table and its name among the options; it changes no token."""
    monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, "periodic": Periodic})
    monkeypatch.setitem(METHOD_OPTIONS, "periodic", ())
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
