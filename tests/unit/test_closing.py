"""A runtime that is closed, or could not be made, leaves nothing of weights, KV, scratch and arguments."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors_alive import alive_in, left_in, storages

import lowlat
from lowlat import ConfigError, Runtime, SamplingParams, SpeculativeConfig
from lowlat.cli.reports import compared, shrink
from lowlat.cli.reports.shifts import measure_shifts
from lowlat.engine.loading import loading
from lowlat.engine.memory.plan import available_bytes
from lowlat.engine.steps import steps as steps_module
from lowlat.executors.make import make_executor
from lowlat.executors.reference import ReferenceExecutor
from lowlat.graphs import Role

DEMO = Path(lowlat.__file__).parent / "demo"
TARGET, HEAD = DEMO / "target", DEMO / "head"
SPECULATIVE = SpeculativeConfig(model=HEAD, num_speculative_tokens=2, strict=True)


class Memory:
    """How many executors were made and closed, each before the next, and what was left after they were."""

    def __init__(self) -> None:
        self.made = self.closed = 0
        self.left: list[torch.Tensor] = []


def memory_of(executor: Any) -> set[int]:
    """State, weights and scratch; not constants, which are the programs' own on a CPU."""
    sets = [(each, spec.name) for each, _ in executor._prepared.values() for spec in each.specs.values()
            if spec.role is Role.SCRATCH]  # fmt: skip
    scratch = [each[name] for each, name in sets]
    return storages([*executor.state.values(), *executor._weights.values(), *scratch])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Looks what an executor has left at the moment when it is closed: later its memory may be another's."""
    found, make, close = Memory(), make_executor, ReferenceExecutor.close

    def made(*arguments: Any, **options: Any) -> Any:
        assert found.made == found.closed, "two at a time"
        found.made += 1
        return make(*arguments, **options)

    def closed(executor: ReferenceExecutor) -> None:
        held = memory_of(executor)
        assert len(alive_in(held)) >= len(held) > 100
        close(executor)
        found.left += left_in(held)
        found.closed += 1

    monkeypatch.setattr(loading, "make_executor", made)
    monkeypatch.setattr(ReferenceExecutor, "close", closed)
    return found


@pytest.mark.second
def test_nothing_is_left_after_close(memory: Memory) -> None:
    runtime = Runtime.load(TARGET, SPECULATIVE, max_batch=2, max_context=64)
    ended = runtime.submit([1, 2, 3], SamplingParams(max_tokens=8))
    while runtime.busy:
        runtime.step()
    runtime.submit([1, 2, 3], SamplingParams(max_tokens=8))
    runtime.step()
    runtime.close()
    assert not memory.left
    assert runtime.metrics(ended).completion_tokens == 8  # figures stay
    assert not runtime.slots()
    runtime.close()
    assert memory.closed == 1


@pytest.mark.wide
def test_commands_that_load_twice_have_one_runtime_at_a_time(memory: Memory) -> None:
    results, checks = measure_shifts(TARGET, HEAD, [[5, 6, 7]], max_tokens=4, chat=False, device="cpu")
    assert len(results) == memory.closed == 3
    assert {check.name: check.verdict for check in checks}["num_speculative_tokens"] == "within what is loaded"
    question = compared.Question("code", "def f(x):")
    silent: Callable[[Any], None] = lambda _: None  # noqa: E731
    few = SamplingParams(max_tokens=4)
    comparison = compared.compare(TARGET, SPECULATIVE, [question], few, chat=False, on_prompt=silent, on_text=silent)
    assert comparison.identical
    assert memory.closed == 5
    assert not memory.left


@pytest.mark.wide
def test_shrinking_measures_one_head_at_a_time(memory: Memory, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[5, 6, 7]]))
    report = shrink.measure(
        TARGET, HEAD, HEAD, prompts, num_prompts=1, max_tokens=4, chat=False, num_speculative_tokens=2, device="cpu"
    )
    assert report["identical"]
    assert memory.closed == 3
    assert not memory.left


def test_a_damaged_tokenizer_is_found_before_anything_is_loaded(memory: Memory, tmp_path: Path) -> None:
    for path in TARGET.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    read: list[int] = []
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Runtime.load(tmp_path, SPECULATIVE, progress=lambda done, total: read.append(done))
    assert not memory.made
    assert not read


@pytest.mark.second
def test_what_fails_after_the_executor_is_there_closes_it(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the books")

    monkeypatch.setattr(steps_module, "Mailbox", failing)
    with pytest.raises(MemoryError, match="books"):
        Runtime.load(TARGET, max_batch=1, max_context=64)
    assert memory.closed == 1
    assert not memory.left
    with pytest.raises(ConfigError, match="device_loop needs executor 'graph'"):
        Runtime.load(TARGET, max_batch=1, max_context=64, device="cpu", device_loop=True)
    assert memory.closed == 1


def test_memory_that_only_torch_s_cache_holds_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = [3 << 30]
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cached.clear())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((4 << 30) - sum(cached), 80 << 30))
    assert available_bytes(torch.device("cuda", 0)) == 4 << 30
