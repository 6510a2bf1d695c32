"""lowlat: large language models decoded at the lowest latency one GPU host can give.

The public names are resolved on first use, so that `import lowlat.ipc` loads neither torch nor Numba.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Busy": "lowlat.errors",
    "CapacityError": "lowlat.errors",
    "ConfigError": "lowlat.errors",
    "DeviceError": "lowlat.errors",
    "LowlatError": "lowlat.errors",
    "RequestError": "lowlat.errors",
    "RequestMetrics": "lowlat.host.metrics",
    "Runtime": "lowlat.host.runtime",
    "RuntimeConfig": "lowlat.options.config",
    "SamplingParams": "lowlat.options.request",
    "ServerGone": "lowlat.errors",
    "SpeculativeConfig": "lowlat.options.config",
    "SpeculativeDecodingStats": "lowlat.host.metrics",
    "StepOutput": "lowlat.options.request",
    "StreamError": "lowlat.errors",
    "TokenLogprobs": "lowlat.options.request",
    "TraceConfig": "lowlat.options.config",
}

__version__ = "0.1.0"
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lowlat' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
