"""How fast a device reads its memory, measured by a described one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from profiling_cases import CPU

from lowlat.tools.profile import wall as profiling_wall


class FakeLauncher:
    """Does what `stream_read` means, or a word less."""

    missed = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> None:
        return None

    def run(self, call: Any) -> None:
        source, _, out = call.arguments
        out.zero_()
        out[0] = profiling_wall.exclusive_or(source.view(torch.int32)) ^ self.missed

    def prepare(self, call: Any) -> Any:
        return SimpleNamespace(issue=lambda _stream: self.run(call))


@pytest.fixture
def fake_launcher(monkeypatch: pytest.MonkeyPatch) -> type[FakeLauncher]:
    """A device that reads 2 MiB in 2 us at best."""
    found = type("Found", (FakeLauncher,), {})
    monkeypatch.setattr("lowlat.executors.launcher.Launcher", found)
    facts = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (9 << 20, 80 << 30))
    turns = iter(range(1000))
    monkeypatch.setattr(profiling_wall, "event_times", lambda issue, count: [0.002 + 0.001 * (next(turns) % 6)] * count)
    return found


def test_wall_is_the_fastest_way_to_read(fake_launcher: type[FakeLauncher]) -> None:
    wall = profiling_wall.measure_wall(CPU, replays=12)
    assert wall.read_bytes == 2 << 20
    assert wall.gb_per_s == max(wall.ways.values()) == pytest.approx((2 << 20) / 2e-6 / 1e9)
    assert len(wall.ways) == len(profiling_wall.WAYS)


def test_a_way_that_misses_a_word_is_an_error(fake_launcher: type[FakeLauncher]) -> None:
    fake_launcher.missed = 1
    with pytest.raises(ArithmeticError, match="did not read every word once"):
        profiling_wall.measure_wall(CPU, read_bytes=1 << 16)
