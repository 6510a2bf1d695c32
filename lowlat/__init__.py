"""lowlat: large language models decoded at the lowest latency one GPU host can give.

The public names are resolved on first use, so that `import lowlat.ipc` loads neither torch nor Numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowlat.engine.calls.streams import AsyncStream, Stream
    from lowlat.engine.metrics import RequestMetrics, SpeculativeDecodingStats
    from lowlat.engine.runtime import Runtime
    from lowlat.engine.sessions.session import Session
    from lowlat.errors import (
        Busy,
        CapacityError,
        ConfigError,
        DeviceError,
        LowlatError,
        RequestError,
        ServerGone,
        SessionError,
        StreamError,
    )
    from lowlat.ipc.answer import Answer, ToolCall
    from lowlat.ipc.chunk import Chunk
    from lowlat.options.request import SamplingParams, StepOutput, TokenLogprobs
    from lowlat.options.runtime import RuntimeConfig, TraceConfig
    from lowlat.options.speculative import SpeculativeConfig

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "AsyncStream",
    "Busy",
    "CapacityError",
    "Chunk",
    "ConfigError",
    "DeviceError",
    "LowlatError",
    "RequestError",
    "RequestMetrics",
    "Runtime",
    "RuntimeConfig",
    "SamplingParams",
    "ServerGone",
    "Session",
    "SessionError",
    "SpeculativeConfig",
    "SpeculativeDecodingStats",
    "StepOutput",
    "Stream",
    "StreamError",
    "TokenLogprobs",
    "ToolCall",
    "TraceConfig",
    "__version__",
]

_HOMES = {
    "Answer": "lowlat.ipc.answer",
    "AsyncStream": "lowlat.engine.calls.streams",
    "Chunk": "lowlat.ipc.chunk",
    "RequestMetrics": "lowlat.engine.metrics",
    "Runtime": "lowlat.engine.runtime",
    "Session": "lowlat.engine.sessions.session",
    "RuntimeConfig": "lowlat.options.runtime",
    "SamplingParams": "lowlat.options.request",
    "SpeculativeConfig": "lowlat.options.speculative",
    "SpeculativeDecodingStats": "lowlat.engine.metrics",
    "StepOutput": "lowlat.options.request",
    "Stream": "lowlat.engine.calls.streams",
    "TokenLogprobs": "lowlat.options.request",
    "ToolCall": "lowlat.ipc.answer",
    "TraceConfig": "lowlat.options.runtime",
}


if not TYPE_CHECKING:  # else every name would be there, and of type Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'lowlat' has no attribute {name!r}")
        return getattr(import_module(_HOMES.get(name, "lowlat.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
