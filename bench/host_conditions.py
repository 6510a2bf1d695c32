"""The conditions of measurements through sockets: commit, machine, versions, and how busy the machine is."""

import os
import platform
from pathlib import Path
from typing import Any

import zmq

from lowlat.tools.bench.machine import commit_at, processor

__all__ = ["host_conditions"]


def host_conditions() -> dict[str, Any]:
    """Commit, machine and versions, and how busy the machine is."""
    return {
        "commit": commit_at(Path(__file__).parent) or "unknown",
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
