"""Which device is chosen, and that a GPU which cannot be used is said aloud."""

import logging
from pathlib import Path

import pytest
import torch

import lowlat
from lowlat import ConfigError, Runtime
from lowlat.executors import devices
from lowlat.executors.devices import choose_device, leave_a_core

TARGET = Path(lowlat.__file__).parent / "demo" / "target"


def present(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, cuda: str | None, available: bool) -> None:
    monkeypatch.setattr(devices, "nvidia_gpu_present", lambda: gpu)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_no_gpu_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, gpu=False, cuda="13.0", available=False)
    choice = choose_device("auto", "auto")
    assert (choice.device.type, choice.loud, choice.reason) == ("cpu", False, "no NVIDIA GPU is present")


@pytest.mark.parametrize(
    ("cuda", "available", "reason"), [(None, False, "built without CUDA"), ("13.0", False, "finds no working driver")]
)
def test_an_unusable_gpu_is_loud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cuda: str | None, available: bool, reason: str
) -> None:
    present(monkeypatch, gpu=True, cuda=cuda, available=available)
    choice = choose_device("auto", "auto")
    assert choice.device.type == "cpu"
    assert choice.loud
    assert reason in choice.reason
    with caplog.at_level(logging.WARNING, logger="lowlat"):
        Runtime.load(TARGET, max_batch=1, max_context=64).close()
    messages = [record.getMessage() for record in caplog.records]
    assert ["an NVIDIA GPU is present but cannot be used" in message for message in messages] == [True]
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda", "auto")


@pytest.mark.parametrize(
    ("capability", "device", "expected"), [((7, 5), "cpu", "7.5 is below 8.0"), ((9, 0), "cuda", "usable NVIDIA GPU")]
)
def test_capability_decides(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], device: str, expected: str
) -> None:
    present(monkeypatch, gpu=True, cuda="13.0", available=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: capability)
    choice = choose_device("auto", "auto")
    assert choice.device.type == device
    assert expected in choice.reason
    assert choice.loud == (device == "cpu")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_usable_gpu_gets_the_graph_executor_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    present(monkeypatch, gpu=True, cuda="13.0", available=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: (9, 0))
    for asked, given in (("auto", "graph"), ("graph", "graph"), ("eager", "eager"), ("reference", "reference")):
        choice = choose_device(device, asked)
        assert (choice.device.type, choice.executor, choice.loud) == ("cuda", given, False)
        assert choice.has_kernels == (given != "reference")


@pytest.mark.parametrize("executor", ["eager", "graph"])
def test_kernels_without_a_usable_gpu_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    refusal = f"executor '{executor}' needs an NVIDIA GPU, and .*%s.*; use 'reference' or 'auto'"
    present(monkeypatch, gpu=False, cuda="13.0", available=False)
    with pytest.raises(ConfigError, match=refusal % "no NVIDIA GPU is present"):
        choose_device("auto", executor)
    with pytest.raises(ConfigError, match=refusal % "the CPU was asked for"):
        choose_device("cpu", executor)
    with pytest.raises(ConfigError, match=refusal % "the CPU was asked for"):
        Runtime.load(TARGET, device="cpu", executor=executor, max_batch=1, max_context=64)
    present(monkeypatch, gpu=True, cuda="13.0", available=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: (7, 5))
    with pytest.raises(ConfigError, match=refusal % "compute capability 7.5 is below 8.0"):
        choose_device("auto", executor)
    assert choose_device("auto", "reference").executor == "reference"


def test_an_executor_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="executor must be one of auto, reference, eager, graph, got 'cuda'"):
        choose_device("auto", "cuda")


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, gpu=True, cuda="13.0", available=True)
    with pytest.raises(ConfigError, match="there are 1 devices"):
        choose_device("cuda:3", "auto")
    for name in ("gpu", "cuda:x", ""):
        with pytest.raises(ConfigError, match="device must be"):
            choose_device(name, "auto")


def test_a_core_is_left_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(5)))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert leave_a_core() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(2)
        assert leave_a_core() == 2
    finally:
        torch.set_num_threads(before)
