"""Load, close, load again, in memory that holds one copy: nothing of the first is left, and the check knows it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowlat
from lowlat import ConfigError, Runtime, SamplingParams, SpeculativeConfig

DEMO = Path(lowlat.__file__).parent / "demo"
HEAD = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=3, strict=True)
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 2048, "kv_blocks": 40_000, "device": "cuda:0"}


def run(executor: str) -> tuple[Runtime, list[int]]:
    runtime = Runtime.load(DEMO / "target", HEAD, executor=executor, **OPTIONS)
    runtime.submit(list(range(5, 300)), SamplingParams(max_tokens=24, ignore_eos=True))
    tokens: list[int] = []
    while runtime.busy:
        tokens.extend(token for output in runtime.step() for token in output.token_ids)
    return runtime, tokens


@pytest.fixture
def one_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A GPU with memory for one copy and a half, the cache of torch counted as taken; its bytes."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    runtime, _ = run("graph")
    taken = torch.cuda.memory_reserved() - before
    runtime.close()
    del runtime
    torch.cuda.empty_cache()
    limit, total = before + taken * 3 // 2, torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (limit - torch.cuda.memory_reserved(), total))
    torch.cuda.set_per_process_memory_fraction(limit / total)
    yield taken
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("executor", ["graph", "eager", "reference"])
def test_a_closed_runtime_makes_room_for_the_next(executor: str, one_copy: int) -> None:
    before = torch.cuda.memory_allocated()
    first, expected = run(executor)
    held = torch.cuda.memory_allocated() - before
    assert held > one_copy // 2
    with pytest.raises(ConfigError, match="GiB are needed on cuda:0"):
        run(executor)  # two at once do not fit, and the check says so before anything is placed
    first.close()
    # `first` is still bound: what is left are workspaces that a matrix library keeps for each stream
    assert torch.cuda.memory_allocated() - before < held // 4
    second, found = run(executor)
    assert found == expected
    second.close()
