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
from lowlat.executors.eager import EagerExecutor
from lowlat.executors.graph import _Addresses
from lowlat.executors.lowering.binding import LibraryCall
from lowlat.graphs import Bucket
from lowlat.kernels.toolchain.kernel import H200, Card
from lowlat.step.prefill import build_prefills

CPU = torch.device("cpu")
AMPERE = Card(108, 163 * 1024, (8, 0))


class Recorder:
    """A launcher that compiles and launches nothing."""

    card = H200

    def __init__(self, *_: object) -> None:
        """It needs no device."""

    def compile_ahead(self, calls: Iterable[Any]) -> int:
        return len(list(calls))


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
    executor: Any = EagerExecutor({bucket: program}, build_prefills(pair.geometry), pair.source, CPU)
    sizes = (64, 128, 256)
    assert set(executor._groups) == {bucket, *sizes}
    owned = _Addresses(executor.owned())
    for size in sizes:
        groups = executor.groups(size)
        calls = [call for group in groups for call in group.calls]
        for call in calls:
            owned.check(call)
        names = [call.name if isinstance(call, LibraryCall) else call.kernel.name for call in calls]
        assert any(name.startswith("prefill_gemm") for name in names) == (card is H200)
        assert ("linear" in names) == (card is not H200)
        attended = [
            call.arguments for call in calls if isinstance(call, LibraryCall) and call.name == "flash_attention"
        ]
        assert {len(each["q"]) for each in attended} == {size}
    executor.close()
