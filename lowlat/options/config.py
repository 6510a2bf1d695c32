"""The options of a Runtime: frozen, validated at construction, refused by name.

It knows neither checkpoints nor devices; what depends on the model (context against max_position, boundaries
against layers) is checked at load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lowlat.errors import ConfigError

__all__ = ["MAX_SPECULATIVE_TOKENS", "RuntimeConfig", "SpeculativeConfig", "TraceConfig"]

MAX_SPECULATIVE_TOKENS = 7
MAX_DECODING_TOKENS = 64


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Refuse anything but an int in [low, high], naming the option, the value and the limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r:.80}")
    if not low <= value <= high:
        # Python refuses to print the digits of a huge integer
        shown = value if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
        raise ConfigError(f"{name} must be from {low} to {high}, got {shown}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Refuse anything but a number in [low, high], naming the option, the value and the limits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number, got {value!r:.80}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {value!r:.80}")


def check_bools(options: object, *names: str) -> None:
    """Refuse options that are not True or False, naming them."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r:.80}")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate: the head, the depth, and the tree.

    num_speculative_tokens is S, the depth; a chain verifies S + 1 rows a slot. `tree` is a choices table (a
    path to YAML, TOML or JSON, or the list of paths itself, each a list of child ranks); None is the chain.
    `max_path_len`, `max_decoding_tokens` and `max_non_leaves_per_layer` bound the tree, root included in the
    first two; None takes what the tree needs. `capture_layers` overrides the head's capture boundaries
    (boundary b: the residual stream entering layer b). `draft_window` keeps the draft's attention to the
    first 4 and the last W rows. `strict` turns a head that does not fit into a ConfigError instead of one
    warning and the baseline. `simulated_accept_length` imposes a mean number of tokens a step (1 to S + 1,
    bonus included) for benchmarks; its text means nothing and every output says so.
    """

    model: str | Path
    method: Literal["eagle3"] = "eagle3"
    num_speculative_tokens: int = 3
    max_path_len: int | None = None
    max_decoding_tokens: int | None = None
    max_non_leaves_per_layer: int | None = None
    capture_layers: tuple[int, ...] | None = None
    tree: str | Path | Sequence[Sequence[int]] | None = None
    draft_window: int | None = None
    enabled: bool = True
    strict: bool = False
    simulated_accept_length: float | None = None
    simulated_seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, Path)) or not str(self.model):
            raise ConfigError(f"model must be the path of a head's directory, got {self.model!r:.80}")
        if self.method != "eagle3":
            raise ConfigError(f"method must be 'eagle3', got {self.method!r}")
        check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        if self.max_path_len is not None:
            check_int("max_path_len", self.max_path_len, 1, MAX_SPECULATIVE_TOKENS + 1)
        if self.max_decoding_tokens is not None:
            check_int("max_decoding_tokens", self.max_decoding_tokens, 1, MAX_DECODING_TOKENS)
        if self.max_non_leaves_per_layer is not None:
            check_int("max_non_leaves_per_layer", self.max_non_leaves_per_layer, 1, MAX_DECODING_TOKENS)
        if self.draft_window is not None:
            check_int("draft_window", self.draft_window, 1, 1 << 20)
        if self.capture_layers is not None:
            if not isinstance(self.capture_layers, (tuple, list)):
                raise ConfigError(f"capture_layers must be a list of boundaries, got {self.capture_layers!r:.80}")
            for layer in self.capture_layers:
                check_int("capture_layers", layer, 0, 1 << 16)
            object.__setattr__(self, "capture_layers", tuple(self.capture_layers))
        check_bools(self, "enabled", "strict")
        length = self.simulated_accept_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, (int, float))):
            raise ConfigError(f"simulated_accept_length must be a number, got {length!r:.80}")
        if length is not None and not 1.0 <= length <= self.num_speculative_tokens + 1:
            raise ConfigError(
                f"simulated_accept_length must be from 1 to num_speculative_tokens + 1 = "
                f"{self.num_speculative_tokens + 1}, got {length}"
            )
        check_int("simulated_seed", self.simulated_seed, 0, (1 << 63) - 1)


@dataclass(frozen=True)
class TraceConfig:
    """Which debug traces to log, on the logger `lowlat.trace`; all off, and then they cost nothing."""

    step: bool = False
    accept: bool = False
    kv: bool = False
    tree: bool = False

    def __post_init__(self) -> None:
        check_bools(self, "step", "accept", "kv", "tree")


@dataclass(frozen=True)
class RuntimeConfig:
    """Sizes and policies of one Runtime.

    max_batch       slots that decode together
    max_context     tokens of prompt and completion of one request, at most
    dtype           "auto" (the checkpoint's), "bfloat16" or "float32"
    device          "auto", "cpu", "cuda" or "cuda:N"
    executor        "auto", "reference", "eager" or "graph"
    block_size      positions of one KV block
    prefill_chunk   positions of one prefill chunk, a multiple of block_size: chunks start at its multiples, and are
                    what requests with equal prefixes share
    max_prefill_chunks  chunks of one prompt that run at once, at most: more of them read a long prompt sooner and
                    hold up those who decode for longer
    kv_blocks       KV blocks in the pool; None: max_batch worst-case requests
    prefix_reuse    share the KV of complete prefill chunks between requests with equal prefixes
    share_decoded   also share what decoding wrote: a later request's bits may then differ from a cold start
    max_queue       requests that may wait for a slot; more are refused with CapacityError
    device_loop     let the GPU repeat steps by itself while nobody joins or leaves: step times then do not depend on
                    what the host does. Needs executor "graph"; loading captures every bucket twice
    watchdog_factor a step or a prefill on a GPU that runs so many times longer than usual is a DeviceError
    watchdog_min_s  but none of fewer seconds
    traces          debug traces
    """

    max_batch: int = 4
    max_context: int = 2048
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    executor: Literal["auto", "reference", "eager", "graph"] = "auto"
    block_size: int = 32
    prefill_chunk: int = 128
    max_prefill_chunks: int = 4
    kv_blocks: int | None = None
    prefix_reuse: bool = True
    share_decoded: bool = False
    max_queue: int = 256
    device_loop: bool = False
    watchdog_factor: float = 10.0
    watchdog_min_s: float = 2.0
    traces: TraceConfig = TraceConfig()

    def __post_init__(self) -> None:
        check_int("max_batch", self.max_batch, 1, 8)
        check_int("max_context", self.max_context, 2, 1 << 20)
        check_int("block_size", self.block_size, 1, 1024)
        check_int("prefill_chunk", self.prefill_chunk, 1, 1 << 16)
        check_int("max_prefill_chunks", self.max_prefill_chunks, 1, 64)
        if self.prefill_chunk % self.block_size:
            raise ConfigError(
                f"prefill_chunk must be a multiple of block_size {self.block_size}, got {self.prefill_chunk}"
            )
        if self.kv_blocks is not None:
            check_int("kv_blocks", self.kv_blocks, 2, (1 << 31) - 1)
        check_int("max_queue", self.max_queue, 0, 1 << 20)
        check_number("watchdog_factor", self.watchdog_factor, 2.0, 1000.0)
        check_number("watchdog_min_s", self.watchdog_min_s, 0.1, 3600.0)
        check_bools(self, "prefix_reuse", "share_decoded", "device_loop")
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r:.80}")
        if not isinstance(self.traces, TraceConfig):
            raise ConfigError(f"traces must be a TraceConfig, got {self.traces!r:.80}")
        if self.share_decoded and not self.prefix_reuse:
            raise ConfigError("share_decoded needs prefix_reuse, which is off")
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"dtype must be 'auto', 'bfloat16' or 'float32', got {self.dtype!r}")
        if self.executor not in ("auto", "reference", "eager", "graph"):
            raise ConfigError(f"executor must be 'auto', 'reference', 'eager' or 'graph', got {self.executor!r}")


def options_from(values: Mapping[str, Any]) -> RuntimeConfig:
    """Build a RuntimeConfig from keyword options; an unknown one is refused by name."""
    known = set(RuntimeConfig.__dataclass_fields__)
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
    return RuntimeConfig(**values)
