"""These types name the keyword options of Python's calls, for type checkers and editors.

Each has the options of one record, with the types that a caller may pass: a list for a tuple of the record, or "auto"
for a number. The records check the values.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from lowlat.ipc.options import SamplingOptions

if TYPE_CHECKING:
    from lowlat.options.runtime import TraceConfig

__all__ = ["CALL_OPTIONS", "CallOptions", "NamedSession", "RuntimeOptions", "SamplingOptions", "SpeculativeOptions"]


class SpeculativeOptions(TypedDict, total=False):
    """The fields of SpeculativeConfig after `model` and `method`; SpeculativeConfig explains each."""

    num_speculative_tokens: int | Literal["auto"]
    adaptive_width: bool
    draft_tensor_parallel_size: int | None
    max_path_len: int | None
    max_decoding_tokens: int | None
    max_non_leaves_per_layer: int | None
    capture_layers: Sequence[int] | None
    tree: str | Path | Sequence[Sequence[int]] | None
    dynamic_tree_max_topk: int | None
    max_draft_len: int | None
    max_total_draft_tokens: int | None
    draft_quantize: Literal["fp8", "int4"] | str | None
    draft_vocab: str | Path | None
    draft_vocab_size: int | None
    draft_window: int | None
    prompt_lookup_min: int
    prompt_lookup_max: int
    text_drafts: Literal["suffix"] | str | None
    suffix_cache_max_depth: int
    max_spec_factor: float
    min_token_prob: float
    max_block_drafts: int
    wide_rows: int
    draft_text_tokens: int
    enabled: bool
    strict: bool
    enable_specpv: bool
    specpv_block_size: int
    specpv_n_sink_blocks: int
    specpv_n_retrieval_blocks: int
    specpv_n_window_blocks: int
    specpv_n_spec_tokens_buf: int
    specpv_partial_threshold: int | None
    specpv_full_refresh_steps: int
    specpv_lossless: bool
    simulated_acceptance: float | None
    simulated_accept_length: float | None
    simulated_seed: int


class RuntimeOptions(TypedDict, total=False):
    """The fields of RuntimeConfig, which explains each."""

    max_batch: int
    max_context: int
    dtype: Literal["auto", "bfloat16", "float32"] | str
    quantize: Literal["fp8", "int4"] | str | None
    quantize_lm_head: bool
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] | str
    activations: Literal["fp8"] | str | None
    device: str
    executor: Literal["auto", "reference", "eager", "graph"] | str
    tensor_parallel_size: int
    devices: Sequence[int]
    tp_invariant: bool
    block_size: int
    prefill_chunk: int
    max_prefill_chunks: int | None
    max_stall_ms: float
    kv_cache_gib: float | Literal["free"] | str | None
    kv_blocks: int | None
    prefix_reuse: bool
    host_cache_gib: float
    pause_gib: float
    pause_deadline_s: float
    cache_dir: str | Path | None
    cache_gib: float
    cache_copy_gb_per_s: float | None
    session_ttl_s: float
    can_sleep: bool
    state_cache_gib: float
    state_interval: int
    share_decoded: bool
    prompt_logprobs: bool
    prompt_logits: bool
    max_queue: int
    device_loop: bool
    forced_rows: int
    perf_mode: Literal["default", "strict"] | str
    fuse: bool
    check: str | None
    on_failed_check: Literal["end", "single"] | str
    count_tiles: bool
    watchdog_factor: float
    watchdog_min_s: float
    traces: "TraceConfig"


class NamedSession(Protocol):
    """A session as an argument of calls: a `lowlat.Session`, whose id is valid within its cache_salt."""

    @property
    def session_id(self) -> str: ...
    @property
    def cache_salt(self) -> str: ...


class CallOptions(SamplingOptions, total=False):
    """The options of `Runtime.generate` and similar calls: those of SamplingParams, and these.

    tool_choice       for messages with tools: "auto", "required", "none", or the name of the function to call
    template_options  for messages: variables of the chat template, such as {"enable_thinking": False}; with
                      {"continue_final_message": True} the answer continues the last message, an assistant's
    allow_special     special tokens that a text or messages spell become these tokens; otherwise they stay text
    cache_salt        only requests of the same salt share cached prefixes
    timeout_s         seconds after which StreamError with the code "timeout" is raised, and the request cancelled
    session           the request's `Session`, or its id; its prefix is kept while the session lives
    """

    tool_choice: str
    template_options: Mapping[str, Any]
    allow_special: bool
    cache_salt: str
    timeout_s: float | None
    session: "NamedSession | str | None"


CALL_OPTIONS = frozenset(CallOptions.__annotations__) - frozenset(SamplingOptions.__annotations__)
