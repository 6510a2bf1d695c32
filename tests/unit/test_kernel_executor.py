"""Buffers that executors with kernels allocate and bind, where a launcher that launches nothing stands for a GPU."""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowered import pretend_gpu
from prefill_cases import NAMES, make_named
from stages import wide
from tensors_alive import left_in, storages
from tiny_models import make_pair

from lowlat.engine.loading import loading
from lowlat.engine.loading.strict import check_launches
from lowlat.errors import ConfigError, DeviceError
from lowlat.executors.distributed import watchdog
from lowlat.executors.distributed.watchdog import COLD_FACTOR, MIN_SAMPLES, Watchdog
from lowlat.executors.eager import EagerExecutor
from lowlat.executors.graph import GraphExecutor, check_call
from lowlat.executors.kernel_executor import KernelOptions
from lowlat.graphs import Bucket
from lowlat.graphs.audit import OwnedMemory
from lowlat.graphs.loop import LoopMemory
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.kernels.tuning.table import Entry, Planned, TuningTable
from lowlat.lowering.binding import LibraryCall
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.step.prefill import build_prefills
from lowlat.step.variants import PASS, first_token_bucket, may_repeat
from lowlat.tools.gpus import describe_gpu
from lowlat.tools.planned_step import target_config
from lowlat.tools.precompile import compile_all, kernels_of

CPU = torch.device("cpu")
AMPERE = Gpu(108, 163 * 1024, (8, 0))
FLASH = re.compile(r"flash_attention|prefill_flash")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """An H200, or another that a test names."""
    chosen: Gpu = getattr(request, "param", H200)
    pretend_gpu(monkeypatch, chosen)
    return chosen


@pytest.mark.parametrize(
    ("gpu", "name"),
    [(H200, "llama"), *(wide(H200, name) for name in NAMES if name != "llama"), (AMPERE, "gpt_oss")],
    indirect=["gpu"],
)
@pytest.mark.second
def test_prefill_of_every_size_is_bound_to_memory_of_the_executor(name: str, gpu: Gpu, tmp_path: Path) -> None:
    """And with multiples of 64 rows, by wide products where the GPU has them."""
    pair = make_named(name, tmp_path)
    pair.geometry = replace(pair.geometry, prefill_chunk=64, max_prefill_chunks=2, max_context=512)
    programs = {Bucket(1, 1, 0): pair.program(0, 1), first_token_bucket(0): pair.program(0, 0)}
    executor: Any = EagerExecutor(programs, build_prefills(pair.geometry), pair.source, CPU)
    sizes = (64, 128)
    assert set(executor._groups) == {*programs, *sizes, PASS}
    owned = OwnedMemory(executor.owned())
    for call in (call for bucket in programs for group in executor.groups(bucket) for call in group.calls):
        check_call(owned, call)
    programs.clear()
    for size in sizes:
        calls = [call for group in executor.groups(size) for call in group.calls]
        for call in calls:
            check_call(owned, call)
        names = [call.name if isinstance(call, LibraryCall) else call.kernel.name for call in calls]
        assert any(name.startswith("prefill_gemm") for name in names) == (gpu is H200)
        assert ("linear" in names) == (gpu is not H200)
        attended = [call.arguments for call, name in zip(calls, names, strict=True) if FLASH.match(name)]
        assert {len(each["q"] if isinstance(each, Mapping) else each[0]) for each in attended} == {size}
    check_counts(executor)
    given = [*pair.source.values(), *executor._constants.tensors()]  # kept by others, on a CPU
    own = storages(executor.owned()) - storages(given)
    del calls, call, attended, given
    executor.close()
    assert not left_in(own)


def planned_of(executor: Any) -> list[tuple[str, Planned]]:
    """Launches that the GPU cuts, by the names of their kernels and their grids."""
    calls = [call for groups in executor._groups.values() for group in groups for call in group.kernel_calls]
    return [(f"{call.kernel.name} {call.grid}", call.planned) for call in calls if call.planned is not None]


@pytest.mark.parametrize("gpu", [H200, AMPERE], ids=["9.0", "8.0"], indirect=True)
def test_launches_with_an_entry_are_tuned_and_strict_mode_asks_for_one_of_each(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry's plan is taken, even the last that anybody would try."""
    strict, entries = RuntimeConfig(perf_mode="strict"), dict[str, dict[str, Entry]]()
    target = target_config(Path("gpt-oss-20b"))
    plain = make_executor("mxfp4", gpu, tmp_path / "plain")
    for _, each in planned_of(plain):
        entries.setdefault(each.kind, {})[each.key] = Entry(each.candidates[-1].knobs)
    with pytest.raises(
        ConfigError, match=r"derived for this GPU: .*; `lowlat tune all --model DIR --missing` measures"
    ):
        check_launches(strict, replace(plain.counts, fallbacks=()), target)
    table = TuningTable("a GPU", gpu.capability, gpu.num_multiprocessors, gpu.shared_bytes, entries=entries)
    pretend_gpu(monkeypatch, replace(gpu, tuning=table))
    tuned = make_executor("mxfp4", gpu, tmp_path / "tuned")
    assert (plain.counts.tuned, tuned.counts.tuned) == (0, tuned.counts.planned)
    check_launches(strict, replace(tuned.counts, fallbacks=()), target)
    before, after = planned_of(plain), planned_of(tuned)
    assert [(each.kind, each.key) for _, each in after] == [(each.kind, each.key) for _, each in before]
    for place in {(each.kind, each.key) for _, each in before if len(each.candidates) > 1}:
        old, new = ({name for name, each in some if (each.kind, each.key) == place} for some in (before, after))
        assert old != new, place


@pytest.mark.parametrize("gpu", [H200, wide(AMPERE)], ids=["9.0", "8.0"], indirect=True)
@pytest.mark.second
def test_kernels_compiled_ahead_are_those_of_a_runtime(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same options, with no weight read; those of the steps that a device repeats, too."""
    pair = make_pair(tmp_path, "llama", hidden_size=64, intermediate_size=96, head_dim=64)
    options = RuntimeConfig(max_batch=2, max_context=96, dtype="bfloat16", device="cpu", device_loop=True)
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=2)
    found: set[str] = set()

    def lowered(_: Any, ranks: Any, weights: Any, *args: Any, **others: Any) -> Any:
        programs = ranks[0].programs
        executor: Any = EagerExecutor(programs, ranks[0].prefills, weights, CPU)
        monkeypatch.setattr(executor, "switches", True, raising=False)
        loop = LoopControl(0, executor.state["active"], torch.zeros(1), torch.zeros(1))
        sizes: list[tuple[Any, ...]] = [(size, None) for size in executor._programs]
        sizes += [(size, loop) for size in programs if may_repeat(size)]
        found.update(
            call.kernel.name for each in sizes for group in executor._lower(*each) for call in group.kernel_calls
        )
        raise InterruptedError

    monkeypatch.setattr(loading, "make_executor", lowered)
    with pytest.raises(InterruptedError):
        loading.load(pair.target, speculative, options)
    ahead = kernels_of(pair.target, speculative, options, gpu)
    assert set(ahead) == found and len(found) > 50
    with pytest.raises(ConfigError, match=r"GPU 'no such GPU' is not described; there are h200, h100"):
        describe_gpu("no such GPU")
    facts, directory, reports = describe_gpu("NVIDIA H200").facts, tmp_path / "kernels", list[tuple[int, int]]()
    few = {name: kernel for name, kernel in ahead.items() if re.match(r"argmax|embed_norm", name)}  # soon compiled
    for lacking in (len(few), 0):
        assert compile_all(few, facts, directory, 1, lambda *given: reports.append(given)) == lacking
    assert reports == [(len(few), len(few))] * 2 and len(list(directory.iterdir())) == len(few) > 1
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/kernels keeps no compiled kernels: .* name another with --out"):
        compile_all(few, facts, tmp_path / "file" / "kernels", 1)


def check_counts(executor: Any) -> None:
    """Launches are counted as they were lowered: what the GPU decides, and what a library does in a kernel's place."""
    calls = [call for size in executor._groups for group in executor.groups(size) for call in group.calls]
    library = [call.name for call in calls if isinstance(call, LibraryCall)]
    counts = executor.counts
    assert (counts.launches, counts.library_calls) == (len(calls) - len(library), len(library))
    assert len(counts.fallbacks) == library.count("linear")
    assert all(re.fullmatch(r"linear in .*'s PREFILL", each) for each in counts.fallbacks)
    gemms = sum("_gemm" in call.kernel.name for call in calls if not isinstance(call, LibraryCall))
    assert gemms <= counts.planned < counts.launches
    assert counts.tuned == 0
    assert (counts.synchronisations, counts.copies) == (0, 0)
    executor.synchronize()
    assert counts.synchronisations == 1


def make_executor(name: str, gpu: Gpu, directory: Path, **options: Any) -> Any:
    """An executor of one bucket, and the bucket."""
    pair = make_named(name, directory)
    bucket = Bucket(1, 1, 0)
    programs, prefills = {bucket: pair.program(0, 1)}, build_prefills(pair.geometry)
    return EagerExecutor(programs, prefills, pair.source, CPU, KernelOptions(**options))


class Stuck:
    """A stream whose work never ends."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait for a device that hangs")


def test_what_hangs_is_an_error_and_the_executor_can_be_closed(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step, a loop of them, or a prefill; a loop that has ended is no error."""
    monkeypatch.setattr(watchdog, "COLD_FACTOR", 1.0)
    executor = make_executor("llama", gpu, tmp_path, watchdog=(2.0, 0.1))
    executor._loop_memory = LoopMemory(CPU, torch.zeros(1, dtype=torch.int64))
    assert GraphExecutor.wait_loop(executor, 5) is False  # idle: it has ended before
    executor.stream = Stuck()
    start = time.monotonic()
    with pytest.raises(DeviceError, match=r"cpu hangs: step 17 has run for .* 0\.1 s are allowed .*watchdog_min_s"):
        executor.wait_published(MIN_SAMPLES + 1)
    assert 0.1 <= time.monotonic() - start < 5.0
    for stopping in (0, 1):
        executor._loop_memory.stopping[0] = stopping
        with pytest.raises(DeviceError, match="hangs: step 17"):
            GraphExecutor.wait_loop(executor, MIN_SAMPLES + 1)
    monkeypatch.setattr(executor, "_run", lambda size: None)
    for first in (None, first_token_bucket(0)):
        with pytest.raises(DeviceError, match=r"hangs: a prefill has run for .* 0\.1 s are allowed"):
            executor.prefill(64, first)
    executor.close()


def test_a_first_token_is_waited_for_in_the_ring(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts after it are not; a device that has done all it was given and published none has failed."""
    executor, ran = make_executor("llama", gpu, tmp_path), []
    head = executor.state["ring_head"]

    def publish(size: Any) -> None:
        ran.append(size)
        head.add_(isinstance(size, Bucket))

    monkeypatch.setattr(executor, "_run", publish)
    executor.stream = Stuck()
    executor.prefill(64, first_token_bucket(0))
    assert ran == [64, first_token_bucket(0)]
    executor.stream = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
    monkeypatch.setattr(executor, "_run", ran.append)
    with pytest.raises(DeviceError, match="idle and has published no first token"):
        executor.prefill(64, first_token_bucket(0))
    executor.close()


def test_a_slow_step_is_none_that_hangs(gpu: Gpu, tmp_path: Path) -> None:
    """It ends in time, and those after it may be as slow; or this process was stopped, and it has ended long ago."""
    executor = make_executor("llama", gpu, tmp_path, watchdog=(4.0, 0.3))
    executor.stream = Stuck()

    def publish(after_s: float, number: int) -> Thread:
        def run() -> None:
            time.sleep(after_s)
            executor.state["ring_head"][0] = number

        thread = Thread(target=run)
        thread.start()
        return thread

    thread = publish(0.2, 20)
    executor.wait_published(20)
    thread.join()
    assert 0.4 < executor._step_watchdog.allowed_s(21) < 10.0
    executor._check_age(1e-9, 20)
    with pytest.raises(DeviceError, match="step 21"):
        executor._check_age(1e-9, 21)
    executor.close()


def test_watchdogs_know_what_is_usual() -> None:
    own = Watchdog(10.0, 2.0)
    assert own.allowed_s(1) == own.allowed_s(MIN_SAMPLES) == 2.0 * COLD_FACTOR
    assert own.allowed_s(MIN_SAMPLES + 1) == 2.0
    own.end(time.monotonic() - 1.0)
    assert own.allowed_s(100) == pytest.approx(10.0, rel=0.1)
    for _ in range(400):
        own.end(time.monotonic())
    assert own.allowed_s(100) == 2.0  # one slow wait is forgotten
    since = own.begin()
    assert own.complaint(since, 100) is None
    assert "has run for 3" in str(own.complaint(since - 3.0, 100))
    assert own.complaint(since - 3.0, 1) is None


def test_pinned_values_that_are_written_into_the_state_are_kept(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copy goes on after the call; others were copied when it returns."""
    executor = make_executor("llama", gpu, tmp_path)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.dtype == torch.int32)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))
    lengths = torch.full_like(executor.state["lengths"], 3)
    executor.write_state({"lengths": lengths})
    assert torch.equal(executor.state["lengths"], lengths)
    ((_, kept),) = executor._sent.held
    assert kept[0] is lengths
    plain = next(name for name, each in executor.state.items() if each.dtype.is_floating_point)
    executor.write_state({plain: torch.zeros_like(executor.state[plain])})
    assert len(executor._sent.held) == 1
