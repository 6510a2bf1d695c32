"""This module lists facts of this machine: versions, the GPU, threads, memory, the cache. It loads no model."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lowlat
from lowlat.checkpoint.files import find_text
from lowlat.engine.memory.plan import available_bytes
from lowlat.executors.devices import choose_device, nvidia_gpu_present
from lowlat.options.directories import cache_directory, kernel_cache_directory, write_problem

__all__ = ["environment"]

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "click", "rich", "numba-cuda", "cuda-core", "gguf")
MAX_VERSION_FILE = 4096


def environment() -> dict[str, Any]:
    """Return JSON values; what is absent is null."""
    choice, kernels = choose_device("auto", "auto"), kernel_cache_directory()
    return {
        "versions": {
            "lowlat": lowlat.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "device": {
            "chosen": str(choice.device),
            "executor": choice.executor,
            "reason": choice.reason,
            "usable_gpu_unused": choice.loud,
        },
        "gpu": _gpu(),
        "cpu": {
            "logical_cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "torch_threads": torch.get_num_threads(),
            "available_bytes": available_bytes(torch.device("cpu")),
        },
        "cache": str(cache_directory()),
        "kernel_cache": {"path": str(kernels), "problem": write_problem(kernels)},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any]:
    """The NVIDIA GPUs, the driver, and what torch sees of them."""
    driver = find_text(Path("/proc/driver/nvidia/version"), MAX_VERSION_FILE)
    usable = torch.cuda.is_available()
    devices = []
    for index in range(torch.cuda.device_count() if usable else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return {
        "present": nvidia_gpu_present(),
        "driver": driver.splitlines()[0].strip() if driver else None,
        "torch_cuda": torch.version.cuda,
        "devices": devices,
    }
