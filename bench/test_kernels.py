"""Each kernel of a step alone, inside a graph of copies that read other layers' weights in turn.

    python -m pytest bench/test_kernels.py -k attention --benchmark-save=kernels --benchmark-save-data

A sample is one copy's part of a replay, by device events. The step is Llama-3.1-8B's, as `bench/micro_entries.py` says.
"""

from functools import cache

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.lib.clock import own_stream, percentile, time_replays
from bench.lib.wall import measure_wall
from bench.micro import Entry, capture
from bench.micro_entries import chain, tree
from bench.samples import MEASURED, record, share_of_wall
from lowlat.executors.launcher import Launcher

REPLAYS = 20  # with more, some slot would reach its limit

pytestmark = MEASURED


@cache
def _device() -> torch.device:
    return torch.device("cuda:0")


@cache
def _wall() -> float:
    with own_stream(_device()):
        return measure_wall(_device()).gb_per_s


@cache
def _entries() -> tuple[Launcher, dict[str, Entry]]:
    """The kernels of a chain's and a tree's step by name, on a step of each that is kept for the session."""
    with own_stream(_device()):
        launcher = Launcher(_device())
        return launcher, {entry.name: entry for entry in (*chain(launcher), *tree(launcher))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each kernel; their names are known where the step can be lowered, on a GPU."""
    if torch.cuda.is_available():
        metafunc.parametrize("name", list(_entries()[1]))
    else:
        metafunc.parametrize("name", [pytest.param("all", marks=pytest.mark.skip(reason="needs a CUDA device"))])


def test_kernel(name: str, benchmark: BenchmarkFixture) -> None:
    launcher, entries = _entries()
    entry = entries[name]
    with own_stream(launcher.device):
        replay = capture(launcher, entry)
        entry.reset()
        times = time_replays(replay, REPLAYS, launcher.device)
    samples = [ms / entry.copies for ms in times]
    share = share_of_wall(entry.moved_bytes, percentile(samples, 50), _wall())
    extra = {"moved_bytes": entry.moved_bytes, "copies": entry.copies, "share_of_wall": share}
    record(benchmark, samples, {**extra, "wall_gb_per_s": _wall()})
