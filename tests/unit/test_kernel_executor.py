"""What the executors with kernels allocate and bind, where a launcher that launches nothing stands for a card."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prefill_cases import NAMES, make_named

from lowlat.executors import kernel_executor
from lowlat.executors.graph import _Addresses
from lowlat.graphs import Bucket
from lowlat.kernels.toolchain.kernel import H200, Card, KernelCall
from lowlat.step.prefill import build_prefills

CPU = torch.device("cpu")
AMPERE = Card(108, 163 * 1024, (8, 0))


class Recorder:
    """A launcher that keeps the calls it is to prepare."""

    card = H200

    def __init__(self, *_: object) -> None:
        self.calls: list[KernelCall] = []

    def compile_ahead(self, calls: Iterable[KernelCall]) -> int:
        return len(list(calls))

    def prepare(self, call: KernelCall) -> Any:
        self.calls.append(call)
        return SimpleNamespace(issue=lambda stream: None)

    def stream(self) -> None:
        """There is none."""


@pytest.fixture(params=[H200, AMPERE], ids=["9.0", "8.0"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    """With and without the instructions of wide products."""
    monkeypatch.setattr(Recorder, "card", request.param)
    monkeypatch.setattr(kernel_executor, "Launcher", Recorder)
    monkeypatch.setattr(kernel_executor, "pinned_names", lambda specs: set())
    idle = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: idle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    chosen: Card = request.param
    return chosen


@pytest.mark.parametrize("name", NAMES)
def test_prefill_of_every_size_is_bound_to_memory_of_the_executor(name: str, card: Card, tmp_path: Path) -> None:
    """And with multiples of 64 rows, by wide products where the card has them."""
    pair = make_named(name, tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=128, max_prefill_chunks=2, max_context=512)
    bucket, program = Bucket(1, 1, 0), pair.program(0, 1)
    executor: Any = kernel_executor.KernelExecutor({bucket: program}, build_prefills(pair.geometry), pair.source, CPU)
    assert list(executor._prefills) == [64, 128, 256]
    owned = _Addresses(executor.owned())
    calls = executor.launcher.calls
    for call in calls:
        owned.check(call)
    assert any(call.kernel.name.startswith("prefill_gemm") for call in calls) == (card is H200)
    for size, prefill in executor._prefills.items():
        tokens = {len(each["tokens"]) for _, each in prefill._bound if "tokens" in each}
        assert tokens == {size}
        chunks = [each["chunk"] for _, each in prefill._bound if "chunk" in each]
        assert {each.data_ptr() for each in chunks} == {executor.state["prefill_chunk"].data_ptr()}
    executor.close()
