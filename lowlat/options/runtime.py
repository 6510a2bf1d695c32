"""This module defines the options of a runtime. They are frozen and checked at construction; errors name the option.

The load checks what depends on the model, such as the context against max_position.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from lowlat.errors import ConfigError, meant
from lowlat.options.checks import parse_checks
from lowlat.options.declaration import check_options, declare, documented, given_options
from lowlat.options.speculative_checks import WIDE_ROWS

if TYPE_CHECKING:
    from lowlat.options.keywords import RuntimeOptions

__all__ = [
    "FEW_SLOTS", "MAX_BATCH", "MAX_CONTEXT", "MAX_KV_BLOCKS", "MAX_PREFILL_CHUNKS", "RuntimeConfig", "TraceConfig",
    "options_from",
]  # fmt: skip

MAX_BATCH, FEW_SLOTS = 32, 8  # most slots, and most slots with which all kinds of steps are supported
MAX_CONTEXT = 1 << 20
MAX_KV_BLOCKS = (1 << 31) - 1
MAX_PREFILL_CHUNKS = 64  # chunks of a prompt in one pass

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


@dataclass(frozen=True)
class TraceConfig:
    """TraceConfig names the debug traces to log, on the logger `lowlat.trace`; those that are off cost nothing."""

    step: bool = False
    accept: bool = False
    kv: bool = False
    tree: bool = False

    def __post_init__(self) -> None:
        check_options(self, ConfigError)


@documented
@dataclass(frozen=True, repr=False)
class RuntimeConfig:
    """RuntimeConfig has the sizes and policies of one Runtime."""

    max_batch: int = declare(4, "Requests that decode together.", 1, MAX_BATCH)
    max_context: int = declare(
        2048, "Tokens of prompt and text.", 2, MAX_CONTEXT, otherwise="2048, or the model's if less"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = declare("auto", "Compute dtype; auto is the checkpoint's.")
    quantize: Literal["fp8", "int4"] | None = declare(
        None, "Round a plain target's linear layers at load; FP8 by row, INT4 in groups of 128 to 32."
    )
    quantize_lm_head: bool = declare(False, "Round the LM head, too.", rare=True)
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = declare(
        "auto",
        "How keys and values are kept; fp8: in 8 bits, by the checkpoint's scales where it has any. auto: as they are.",
    )
    activations: Literal["fp8"] | None = declare(
        None,
        "Round a prompt's rows to FP8, each by a scale of its own, for layers in FP8 by row: prompts are read sooner, "
        "and tokens may differ.",
        rare=True,
    )
    device: str = declare("auto", "auto, cpu, cuda or cuda:N.")
    executor: Literal["auto", "reference", "eager", "graph"] = declare("auto", "How steps are run.")
    tensor_parallel_size: int = declare(
        1, "GPUs that share each layer: 1, 2, 4 or 8.", 1, 8, aliases=("tensor_parallel",)
    )
    devices: tuple[int, ...] = declare(
        (), "The GPUs of tensor_parallel_size, by number; by default the first.", rare=True
    )
    tp_invariant: bool = declare(
        False, "Sum layers as 8 GPUs would, on however many: then their number changes no bit.", rare=True
    )
    block_size: int = declare(32, "Positions of one KV block.", 1, 1024, rare=True)
    prefill_chunk: int = declare(
        128,
        "Positions of a prefill chunk, a multiple of block_size: the unit of shared prefixes.",
        1,
        1 << 16,
        rare=True,
    )
    max_prefill_chunks: int | None = declare(
        None,
        "Chunks of a prompt that run at once while nobody decodes. More of them take memory, and a short prompt that "
        "comes meanwhile waits longer.",
        1,
        MAX_PREFILL_CHUNKS,
        otherwise="2,048 positions; 4,096 or 8,192 of a model with many experts",
        rare=True,
    )
    max_stall_ms: float = declare(
        25.0,
        "Chunks that run at once while others decode are as many as take no longer, but one at least.",
        1.0,
        10000.0,
        rare=True,
    )
    kv_cache_gib: float | Literal["free"] | None = declare(
        None,
        "GiB of KV cache on a GPU; free: all that is left. Prefixes of idle conversations stay in what running "
        "requests leave of it. It holds the pools of all layers, of windows and of the draft model too; snapshots of "
        "recurrent states have state_cache_gib.",
        0.0,
        16384.0,
        above=True,
        words=("free",),
        otherwise="what max_batch needs",
    )
    kv_blocks: int | None = declare(
        None,
        "KV blocks in the pool, in place of kv_cache_gib; layers of windows have their own.",
        2,
        MAX_KV_BLOCKS,
        otherwise="what max_batch needs",
        rare=True,
    )
    prefix_reuse: bool = declare(
        True, "Share the KV of complete prefill chunks between requests with equal prefixes.", rare=True
    )
    host_cache_gib: float = declare(
        0.0,
        "Host memory for prefixes that the device's memory has no space for, GiB; with a cache_dir 1 at least.",
        0.0,
        16384.0,
        rare=True,
    )
    pause_gib: float = declare(
        4.0,
        "Host memory for requests that give their slot away, paused or for one of higher priority, GiB.",
        0.0,
        16384.0,
        rare=True,
    )
    pause_deadline_s: float = declare(3600.0, "A request that is paused for longer is ended.", 0.001, 1e9, rare=True)
    cache_dir: str | Path | None = declare(
        None,
        "Directory for cached prefixes that outlive the process.",
        otherwise="no files",
    )
    cache_gib: float = declare(
        32.0,
        "Size of the cached prefixes in cache_dir, of all models, GiB: the files used longest ago go first.",
        0.001,
        1e6,
        rare=True,
    )
    cache_copy_gb_per_s: float | None = declare(
        None,
        "Copies between the device and the cache's host memory take no more of the bus, GB/s.",
        0.001,
        1e6,
        otherwise="all that it has",
        rare=True,
    )
    session_ttl_s: float = declare(
        600.0,
        "Prefixes of a session (x-session-id) stay before others for so long after its last request, seconds.",
        0.0,
        1e9,
        rare=True,
    )
    can_sleep: bool = declare(
        False, "Load so that Runtime.sleep can give the device's memory back, and wake can take it again.", rare=True
    )
    state_cache_gib: float = declare(
        2.0,
        "Memory for snapshots of recurrent states, GiB: prompts that share a prefix go on from one.",
        0.0,
        4096.0,
        rare=True,
    )
    state_interval: int = declare(
        8192,
        "Keep a snapshot at every so many positions of a prompt, besides its end and where prompts part; 0: no more.",
        0,
        1 << 24,
        rare=True,
    )
    share_decoded: bool = declare(
        False, "Also share what decoding wrote: a later request's bits may then differ from a cold start.", rare=True
    )
    prompt_logprobs: bool = declare(
        True,
        "Requests may ask for the logprobs of their prompts; prefill then keeps a row of each of its positions. Not in "
        "perf_mode strict.",
        rare=True,
    )
    prompt_logits: bool = declare(
        False,
        "Keep the logits of all positions of the chunk that was prefilled last: for measuring. Needs prefix_reuse off.",
        python_only=True,
    )
    max_queue: int = declare(
        256, "Requests that may wait for a slot; more are refused with CapacityError.", 0, 1 << 20, python_only=True
    )
    device_loop: bool = declare(
        False,
        "Let the GPU repeat steps by itself while nobody joins or leaves. Needs executor graph.",
    )
    forced_rows: int = declare(
        0,
        "Rows a slot, 16 or 32 at most, of steps that verify a long text which a request's grammar forces, such as the "
        "keys of JSON; with any method of drafting, or none. 0: as many as drafts.",
        0,
        WIDE_ROWS[-1],
        rare=True,
    )
    perf_mode: Literal["default", "strict"] = declare(
        "default",
        "strict: greedy requests alone, no debugging, and an error in place of anything slower than the kernels that "
        "were tuned: for measuring.",
        rare=True,
    )
    fuse: bool = declare(
        True, "Cover runs of operations by one launch; without it each has its own: for debugging.", rare=True
    )
    check: str | None = declare(
        None,
        "Check in each step, on the device, masks (of trees), spans (of KV blocks), lengths: any of them with commas, "
        "or all; for debugging and soaks.",
        metavar="KIND,KIND",
        rare=True,
    )
    on_failed_check: Literal["end", "single"] = declare(
        "end",
        "Where a check fails the step's tokens of that request are dropped, and it ends with an error; single: it goes "
        "on without drafts, and ends when another check fails.",
        rare=True,
    )
    count_tiles: bool = declare(
        False,
        "Count the tiles of 64 positions that attention walks in decode steps, by kind of layer; on the host, which "
        "takes its time.",
        rare=True,
    )
    watchdog_factor: float = declare(
        10.0,
        "A step or a prefill on a GPU that runs so many times longer than usual is an error.",
        2.0,
        1000.0,
        python_only=True,
    )
    watchdog_min_s: float = declare(2.0, "But none of fewer seconds.", 0.1, 3600.0, python_only=True)
    traces: TraceConfig = declare(TraceConfig(), "Debug traces.", python_only=True)

    if TYPE_CHECKING:  # callers may pass more types than a field has

        def __init__(self, **options: Unpack[RuntimeOptions]) -> None: ...

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.prefill_chunk % self.block_size:
            raise ConfigError(
                f"prefill_chunk must be a multiple of block_size {self.block_size}, got {self.prefill_chunk}"
            )
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r:.80}")
        if not isinstance(self.traces, TraceConfig):
            raise ConfigError(f"traces must be a TraceConfig, got {self.traces!r:.80}")
        if self.kv_cache_gib is not None and self.kv_blocks is not None:
            raise ConfigError(
                f"kv_cache_gib {self.kv_cache_gib!r} and kv_blocks {self.kv_blocks} both size the KV cache; leave one "
                "of them out"
            )
        if self.quantize_lm_head and self.quantize is None:
            raise ConfigError("quantize_lm_head needs quantize, which says to what")
        if self.activations is not None and self.tp_invariant:
            raise ConfigError(
                f"activations {self.activations!r} scales the rows that each GPU has, and tp_invariant has the same "
                "bits on any number of them; leave one of them out"
            )
        if self.prompt_logits and self.prefix_reuse:
            raise ConfigError("prompt_logits needs prefix_reuse off: shared chunks are not run again")
        if self.share_decoded and not self.prefix_reuse:
            raise ConfigError("share_decoded needs prefix_reuse, which is off")
        if self.forced_rows not in (0, *WIDE_ROWS):
            raise ConfigError(f"forced_rows must be 0, {' or '.join(map(str, WIDE_ROWS))}, got {self.forced_rows}")
        if self.on_failed_check != "end" and not self.checked_kinds:
            raise ConfigError(f"on_failed_check {self.on_failed_check!r} needs check, which names none")
        self._check_ranks()
        self._check_perf_mode()

    def __repr__(self) -> str:
        return given_options(self)

    def _check_ranks(self) -> None:
        """The number of GPUs, and that those which are named are as many, each once."""
        if isinstance(self.devices, list):
            object.__setattr__(self, "devices", tuple(self.devices))
        size, named = self.tensor_parallel_size, self.devices
        if size & (size - 1):
            raise ConfigError(f"tensor_parallel_size must be 1, 2, 4 or 8, got {size}")
        if size > 1 and self.max_batch > FEW_SLOTS:
            raise ConfigError(
                f"max_batch {self.max_batch} is not implemented for tensor_parallel_size {size}, whose steps have at "
                f"most {FEW_SLOTS} slots; lower max_batch, or take one GPU"
            )
        for name, is_on in (("check", bool(self.checked_kinds)), ("count_tiles", self.count_tiles)):
            if size > 1 and is_on:
                raise ConfigError(f"{name} is not implemented for tensor_parallel_size {size}; leave one of them out")
        if not isinstance(named, tuple) or any(type(number) is not int or number < 0 for number in named):
            raise ConfigError(f"devices must be numbers of GPUs, such as (0, 1), got {named!r:.80}")
        if self.count_tiles and self.tp_invariant:
            raise ConfigError("count_tiles is not implemented for tp_invariant; leave one of them out")
        if named and self.device not in ("auto", "cuda"):
            raise ConfigError(f"devices names GPUs, and device {self.device!r} asks for one")
        if named and (len(named) != size or len(set(named)) != size):
            raise ConfigError(f"devices must name as many GPUs as tensor_parallel_size {size}, each once, got {named}")

    def _check_perf_mode(self) -> None:
        """Refuse what is for debugging, where measuring is asked for."""
        debugging = {
            "executor": self.executor == "eager",
            "fuse": not self.fuse,
            "check": bool(self.checked_kinds),
            "traces": self.traces != TraceConfig(),
        }
        for name, is_on in debugging.items():
            if self.is_strict and is_on:
                raise ConfigError(f"{name} {getattr(self, name)!r} is for debugging, which perf_mode 'strict' refuses")

    @property
    def checked_kinds(self) -> frozenset[str]:
        """Name the kinds of checks that each step makes. Raises ConfigError for a name that is none."""
        return parse_checks(self.check)

    @property
    def is_strict(self) -> bool:
        """Whether perf_mode is strict."""
        return self.perf_mode == "strict"


def options_from(values: Mapping[str, Any]) -> RuntimeConfig:
    """Build a RuntimeConfig from keyword options; an unknown one is refused by name."""
    known = set(RuntimeConfig.__dataclass_fields__)
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]!r:.80}{meant(unknown[0], known)}; the options are {', '.join(sorted(known))}"
        )
    return RuntimeConfig(**values)
