"""This module chooses a runtime's device and executor, and logs the reason."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowlat.errors import ConfigError

__all__ = ["DeviceChoice", "choose_device", "leave_a_core", "make_current", "nvidia_gpu_present", "rank_devices"]

OLDEST_CAPABILITY = (8, 0)
EXECUTORS = ("auto", "reference", "eager", "graph")


@dataclass(frozen=True)
class DeviceChoice:
    """The chosen device and executor; `reason` is one sentence; `loud` asks for a warning."""

    device: torch.device
    executor: str
    reason: str
    loud: bool = False

    @property
    def has_kernels(self) -> bool:
        """Whether the executor runs kernels of its own."""
        return self.executor != "reference"


def rank_devices(choice: DeviceChoice, size: int, named: Sequence[int] = ()) -> list[torch.device]:
    """The devices of ranks: the named ones, else the chosen one and those after it.

    Without kernels all ranks share the chosen device. Raises ConfigError for a GPU that is not there.
    """
    if not choice.has_kernels:
        return [choice.device] * size
    first = choice.device.index or 0
    devices = [torch.device("cuda", gpu) for gpu in named or range(first, first + size)]
    for device in devices:
        problem = _cuda_problem(device.index or 0)
        if problem:
            raise ConfigError(f"tensor_parallel_size {size} with {device} (devices): {problem}")
    return devices


def nvidia_gpu_present() -> bool:
    """Whether this machine has an NVIDIA GPU, usable or not."""
    return Path("/proc/driver/nvidia/gpus").is_dir() or shutil.which("nvidia-smi") is not None


def choose_device(device: str, executor: str) -> DeviceChoice:
    """Resolve the options `device` and `executor`.

    Raises ConfigError for an unknown or unusable device, and for an executor that the device does not support.
    """
    if executor not in EXECUTORS:
        raise ConfigError(f"executor must be one of {', '.join(EXECUTORS)}, got {executor!r}")
    if device == "cpu":
        _refuse_kernels(executor, "the CPU was asked for")
        return DeviceChoice(torch.device("cpu"), "reference", "the CPU was asked for")
    if device == "auto":
        return _choose_automatically(executor)
    name, colon, index = device.partition(":")
    if name != "cuda" or (colon and not index.isdecimal()):
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    problem = _cuda_problem(int(index or 0))
    if problem:
        raise ConfigError(f"device {device!r} cannot be used: {problem}")
    chosen = "graph" if executor == "auto" else executor
    return DeviceChoice(torch.device("cuda", int(index or 0)), chosen, f"{device} was asked for")


def _refuse_kernels(executor: str, why: str) -> None:
    if executor in ("eager", "graph"):
        raise ConfigError(f"executor {executor!r} needs an NVIDIA GPU, and {why}; use 'reference' or 'auto'")


def leave_a_core() -> int:
    """Set this process's torch threads to one fewer than its cores, at least one; return their number.

    The reference executor's GEMMs are small, and a GEMM on all cores waits for the slowest thread: next to one
    busy process decoding was seen to fall from 66 to 5 tokens a second on two cores. OMP_NUM_THREADS takes precedence.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    return torch.get_num_threads()


def make_current(device: torch.device) -> None:
    """Make a device current in the calling thread: launches need a CUDA context, and each thread has its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # an allocation and a launch: set_device alone may put the context off
        torch.cuda.synchronize(device)


def _choose_automatically(executor: str) -> DeviceChoice:
    cpu = torch.device("cpu")
    if not nvidia_gpu_present():
        _refuse_kernels(executor, "no NVIDIA GPU is present")
        return DeviceChoice(cpu, "reference", "no NVIDIA GPU is present")
    problem = _cuda_problem(0)
    if problem:
        _refuse_kernels(executor, f"the one that is present cannot be used: {problem}")
        return DeviceChoice(cpu, "reference", f"an NVIDIA GPU is present but cannot be used: {problem}", loud=True)
    chosen = "graph" if executor == "auto" else executor
    return DeviceChoice(torch.device("cuda", 0), chosen, "a usable NVIDIA GPU is present")


def _cuda_problem(index: int) -> str | None:
    """Why a CUDA device cannot be used, or None."""
    if torch.version.cuda is None:
        return f"this torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no working driver; see nvidia-smi"
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} devices, numbered from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None
