"""The options of a Runtime: frozen, validated at construction, refused by name.

What depends on the model (context against max_position, boundaries against layers) is checked at load.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

from lowlat.errors import ConfigError
from lowlat.options.acceptance import acceptance_for
from lowlat.options.checks import parse_checks
from lowlat.options.declaration import check_integer, check_options, declare, documented, given_options, options_of
from lowlat.options.limits import LimitCheck, compare_limits

if TYPE_CHECKING:
    from lowlat.options.keywords import RuntimeOptions, SpeculativeOptions

__all__ = [
    "AUTO_METHOD", "MAX_SPECULATIVE_TOKENS", "METHOD_OPTIONS", "NEEDS_MODEL", "WIDE_ROWS", "RuntimeConfig",
    "SpeculativeConfig", "TraceConfig",
]  # fmt: skip

MAX_SPECULATIVE_TOKENS = 7
MAX_DECODING_TOKENS = 64
MAX_TOPK = 16
MAX_DRAFT_TOKENS = 31  # of a dynamic tree: with its root 32 rows
MAX_LOOKUP = 16
MAX_DEPTH = 32
WIDE_ROWS = (16, 32)  # of a slot, in wide steps
MAX_BLOCK_DRAFTS = WIDE_ROWS[0] - 1  # that a wide step verifies
MAX_DRAFT_TEXT = 1 << 18

# Options of one method alone: with others they must keep their defaults. Options that stand nowhere are of all methods.
_DYNAMIC = ("dynamic_tree_max_topk", "max_draft_len", "max_total_draft_tokens")
_STATIC = ("tree", "max_path_len", "max_non_leaves_per_layer")
_TREES = (*_STATIC, *_DYNAMIC)
_VOCABULARY = ("draft_vocab", "draft_vocab_size")
METHOD_OPTIONS: dict[str, tuple[str, ...]] = {
    "eagle3": ("model", "draft_quantize", "capture_layers", "draft_window", "text_drafts", *_VOCABULARY, *_TREES),
    "mtp": ("draft_quantize", "capture_layers", "draft_window", "text_drafts", *_VOCABULARY, *_TREES),
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("suffix_cache_max_depth", "max_spec_factor", "min_token_prob", "wide_rows", "draft_text_tokens"),
    "peagle": ("model", "draft_quantize", "capture_layers", "draft_window", *_VOCABULARY, *_TREES),
    "dflash": ("model", "draft_quantize", "capture_layers", "max_block_drafts", *_VOCABULARY, *_TREES),
    "dspark": ("model", "draft_quantize", "capture_layers", *_STATIC),
    "draft_model": ("model", "draft_quantize", "text_drafts", *_VOCABULARY),
}
NEEDS_MODEL = frozenset(method for method, names in METHOD_OPTIONS.items() if "model" in names)
AUTO_METHOD = "auto"  # stands for a method that models' files name: it is settled at load
METHOD_OPTIONS[AUTO_METHOD] = tuple(
    dict.fromkeys(name for method, names in METHOD_OPTIONS.items() if method in (*NEEDS_MODEL, "mtp") for name in names)
)


_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
_SIZES = frozenset({"num_speculative_tokens", "max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer"})


class Limited(Protocol):
    """A runtime, as `SpeculativeConfig.check` knows it."""

    @property
    def speculation_limits(self) -> Mapping[str, Any]:
        """The options that it was loaded with, by name; empty without speculation."""


@documented
@dataclass(frozen=True, repr=False)
class SpeculativeConfig:
    """How to speculate: the method, the depth, and the tree.

    `method` is "eagle3", "peagle", "dflash" or "dspark", with a draft model of that kind, `model`, a directory or
    `ORG/NAME[@REVISION]`; "draft_model", with any smaller model of the target's vocabulary; or "mtp", with the target's
    own multi-token prediction layer, which is in its files. "auto" is the method that `model` is for or, where none is
    given, "mtp". "ngram" drafts what followed the longest suffix of
    the text,
    `prompt_lookup_min` to `prompt_lookup_max` tokens, where it stood before. "suffix" needs none either: it drafts what
    followed endings of the text most often. With `text_drafts` EAGLE3's model has such drafts next to it: each step
    verifies, by slot, those of which more should be accepted. With `wide_rows` such drafts are verified 15 or 31 at a
    time while the text copies what stands in it, or in texts that the request names (`draft_text_tokens`).
    num_speculative_tokens is S, the depth; the string "auto" is taken too: `adaptive_width` with S up to 7. A
    chain verifies S + 1 rows a slot. `tree` is a path or the list of paths
    itself, each a list of child ranks; None is the chain. Limits of the tree that are None take what it needs.
    `dynamic_tree_max_topk` makes a tree whose contents are chosen in each step: at each of `max_draft_len` levels (S)
    so many of the likeliest tokens are looked at after so many of the best drafts of the level before, and of all of
    them the `max_total_draft_tokens` best are verified.
    With `enable_specpv` the target's layers without windows verify over a part of their KV cache: sinks, blocks that
    each head chose, the last ones; every few steps a pass over all of it recomputes what was written meanwhile and
    chooses again. Tokens are then not certain to be the target's: SpecPV is lossy, and says so wherever it shows,
    unless `specpv_lossless` verifies what such steps propose.
    Boundary b of `capture_layers` is the residual stream entering layer b. Without `strict`, a draft model that does
    not fit is one warning and the baseline.
    """

    model: str | Path | None = declare(
        None,
        "A draft model for it: a directory, or ORG/NAME; EAGLE3, P-EAGLE, DFlash, DSpark, or a whole small model.",
        key="head",
        aliases=("draft_model",),
        metavar="MODEL",
    )
    method: str = declare(
        "eagle3",
        "How drafts are made. auto: as the draft model says; without one, by the target's MTP layer.",
        kind="choice",
        choices=METHOD_OPTIONS,
    )
    num_speculative_tokens: int = declare(
        3,
        "Depth of speculation; 0: none; auto: each step's is chosen, up to 7 (adaptive_width).",
        0,
        MAX_SPECULATIVE_TOKENS,
        flags=("-S",),
        words=("auto",),
        otherwise="3, or the tree's depth",
    )
    adaptive_width: bool = declare(
        False,
        "Let each step choose how many drafts it makes and verifies, from none to num_speculative_tokens, by what is "
        "accepted and what it costs; of chains.",
        rare=True,
    )
    draft_tensor_parallel_size: int | None = declare(
        None,
        "GPUs that share the draft model's layers: 1, each has all, or the target's.",
        1,
        8,
        otherwise="tensor_parallel_size, where it can be cut",
        rare=True,
    )
    max_path_len: int | None = declare(
        None,
        "Nodes of a tree's longest path, root included, at most.",
        1,
        MAX_SPECULATIVE_TOKENS + 1,
        group="trees",
        rare=True,
    )
    max_decoding_tokens: int | None = declare(
        None, "Nodes of a tree, root included, at most.", 1, MAX_DECODING_TOKENS, group="trees", rare=True
    )
    max_non_leaves_per_layer: int | None = declare(
        None, "A tree's nodes with children at one depth, at most.", 1, MAX_DECODING_TOKENS, group="trees", rare=True
    )
    capture_layers: tuple[int, ...] | None = declare(
        None, "Boundaries that the draft model reads, in place of its config's.", metavar="B,B,B"
    )
    tree: str | Path | Sequence[Sequence[int]] | None = declare(
        None, "A table of choices: YAML, TOML or JSON.", metavar="FILE", group="trees"
    )
    dynamic_tree_max_topk: int | None = declare(
        None,
        "Drafts of a level that a dynamic tree goes on from, and drafts that it looks at after each; makes the tree.",
        2,
        MAX_TOPK,
        group="trees",
    )
    max_draft_len: int | None = declare(
        None,
        "Depth of a dynamic tree.",
        2,
        MAX_SPECULATIVE_TOKENS,
        otherwise="num_speculative_tokens",
        group="trees",
        rare=True,
    )
    max_total_draft_tokens: int | None = declare(
        None,
        "Drafts of a dynamic tree that a slot verifies.",
        2,
        MAX_DRAFT_TOKENS,
        otherwise="7",
        group="trees",
        rare=True,
    )
    draft_quantize: Literal["fp8", "int4"] | None = declare(
        None, "Round a plain draft model's linear layers at load, as quantize does a target's."
    )
    draft_vocab: str | Path | None = declare(
        None,
        "Draft only the tokens that occur in a file: a text, or ids (.json).",
        metavar="FILE",
    )
    draft_vocab_size: int | None = declare(
        None,
        "Tokens of draft_vocab that are drafted: those that occur most.",
        1,
        1 << 20,
        otherwise="all that occur",
        rare=True,
    )
    draft_window: int | None = declare(
        None, "The draft model attends to the first 4 and the last N rows only.", 1, 1 << 20
    )
    max_block_drafts: int = declare(
        0,
        "DFlash's drafts of a step, up to 15, while those of the last steps were all accepted; 0: never more than "
        "num_speculative_tokens.",
        0,
        MAX_BLOCK_DRAFTS,
        rare=True,
    )
    prompt_lookup_min: int = declare(
        2, "Tokens of an n-gram, at least.", 1, MAX_LOOKUP, group="drafts from text", rare=True
    )
    prompt_lookup_max: int = declare(
        4, "Tokens of an n-gram, at most.", 1, MAX_LOOKUP, group="drafts from text", rare=True
    )
    text_drafts: Literal["suffix"] | None = declare(
        None,
        "Drafts from the request's own text next to the draft model's, where more of them should be accepted.",
        group="drafts from text",
    )
    suffix_cache_max_depth: int = declare(
        24, "Tokens of an ending that is looked for, at most.", 1, MAX_DEPTH, group="drafts from text", rare=True
    )
    max_spec_factor: float = declare(
        1.0,
        "Suffix drafts for each token of the ending that was found, at most.",
        0,
        16,
        above=True,
        group="drafts from text",
        rare=True,
    )
    min_token_prob: float = declare(
        0.1,
        "Share of an ending's places that must have all drafts up to the last one.",
        0,
        1,
        group="drafts from text",
        rare=True,
    )
    wide_rows: int = declare(
        0,
        "Rows a slot, 16 or 32 at most, of steps that verify a long copy whose drafts from text were right so far; 0: "
        "there are none.",
        0,
        WIDE_ROWS[-1],
        group="drafts from text",
        rare=True,
    )
    draft_text_tokens: int = declare(
        0,
        "Tokens of texts that a request may name to draft from (draft_texts), next to its own; 0: none may be named.",
        0,
        MAX_DRAFT_TEXT,
        group="drafts from text",
        rare=True,
    )
    enabled: bool = declare(True, "Whether to speculate.", python_only=True)
    strict: bool = declare(False, "A draft model that does not fit is an error.")
    enable_specpv: bool = declare(
        False,
        "SpecPV, which is lossy: from specpv_partial_threshold tokens on the target attends to a part of its KV cache, "
        "and tokens may differ.",
        group="SpecPV",
    )
    specpv_block_size: int = declare(
        16, "SpecPV: positions of a block that is chosen whole.", 1, 1024, group="SpecPV", rare=True
    )
    specpv_n_sink_blocks: int = declare(
        2, "SpecPV: blocks at the text's start that are always attended to.", 1, 4096, group="SpecPV", rare=True
    )
    specpv_n_retrieval_blocks: int = declare(
        256, "SpecPV: blocks that each KV head chooses by the last queries.", 1, 1 << 16, group="SpecPV", rare=True
    )
    specpv_n_window_blocks: int = declare(
        8, "SpecPV: last blocks, which are always attended to.", 1, 4096, group="SpecPV", rare=True
    )
    specpv_n_spec_tokens_buf: int = declare(
        128,
        "SpecPV: positions that partial steps may write before a refresh recomputes them.",
        2,
        1 << 14,
        group="SpecPV",
        rare=True,
    )
    specpv_partial_threshold: int | None = declare(
        None,
        "SpecPV: a context of fewer tokens is attended to whole, with the bits of a runtime without SpecPV.",
        0,
        1 << 20,
        otherwise="32768; lossless, where it pays by bytes",
        group="SpecPV",
        rare=True,
    )
    specpv_full_refresh_steps: int = declare(
        32,
        "SpecPV: partial steps between two refreshes, at most; lossless, a verification comes first.",
        1,
        1 << 16,
        group="SpecPV",
        rare=True,
    )
    specpv_lossless: bool = declare(
        False,
        "SpecPV whose partial steps only propose: a step over all of the cache verifies up to 31 tokens.",
        group="SpecPV",
    )
    simulated_acceptance: float | None = declare(
        None,
        "Impose that each draft is accepted with this probability where those before it were, for benchmarks; the text "
        "then means nothing.",
        0,
        1,
        rare=True,
    )
    simulated_accept_length: float | None = declare(
        None,
        "Impose acceptance, as the tokens a step, 1 to S + 1, that it comes to at num_speculative_tokens.",
        rare=True,
    )
    simulated_seed: int = declare(0, "Seed of the imposed acceptance.", 0, (1 << 63) - 1, rare=True)

    if TYPE_CHECKING:  # callers may give more than a field's own type

        def __init__(
            self, model: str | Path | None = None, method: str = "eagle3", **options: Unpack[SpeculativeOptions]
        ) -> None: ...

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if str(self.num_speculative_tokens) == "auto":
            object.__setattr__(self, "num_speculative_tokens", MAX_SPECULATIVE_TOKENS)
            object.__setattr__(self, "adaptive_width", True)
        self._check_method()
        self._check_dynamic_tree()
        self._check_limits()
        trees = [name for name in ("tree", "dynamic_tree_max_topk") if getattr(self, name) is not None]
        if self.adaptive_width and (trees or not self.num_speculative_tokens):
            problem = f"{trees[0]} asks for one of its own" if trees else "num_speculative_tokens is 0"
            raise ConfigError(f"adaptive_width chooses among chains of at least one draft, and {problem}")
        if self.capture_layers is not None:
            if not isinstance(self.capture_layers, (tuple, list)):
                raise ConfigError(f"capture_layers must be a list of boundaries, got {self.capture_layers!r:.80}")
            for layer in self.capture_layers:
                check_integer("capture_layers", layer, 0, 1 << 16, ConfigError)
            object.__setattr__(self, "capture_layers", tuple(self.capture_layers))
        self._check_specpv()
        self._check_wide()
        self._check_block()
        length = self.simulated_accept_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, (int, float))):
            raise ConfigError(f"simulated_accept_length must be a number, got {length!r:.80}")
        if length is not None and self.simulated_acceptance is not None:
            raise ConfigError("simulated_acceptance and simulated_accept_length say the same; give one of them")
        if length is not None:
            acceptance_for(length, self.num_speculative_tokens)  # which refuses what cannot be

    def __repr__(self) -> str:
        return given_options(self)

    @property
    def imposed_acceptance(self) -> float | None:
        """The probability with which each draft is accepted; None: acceptance is the draft model's own."""
        if self.simulated_accept_length is None:
            return self.simulated_acceptance
        return acceptance_for(self.simulated_accept_length, self.num_speculative_tokens)

    def check(self, runtime: "Limited") -> list[LimitCheck]:
        """Say how this configuration lies next to what a runtime was loaded with, option by option.

        A size within the runtime's fits; another method, or other boundaries, ask for another load. A chain's limits
        are those that its draft length needs, where none are given.
        """
        chain = self.tree is None and self.dynamic_tree_max_topk is None
        rows = self.num_speculative_tokens + 1 if chain else None
        asked = {
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
            "max_path_len": self.max_path_len or rows,
            "max_decoding_tokens": self.max_decoding_tokens or rows,
            "max_non_leaves_per_layer": self.max_non_leaves_per_layer,
            "capture_layers": self.capture_layers,
        }
        return compare_limits(asked, runtime.speculation_limits, _SIZES)

    def _check_limits(self) -> None:
        """Refuse limits that a chain of this draft length exceeds, and limits that exclude each other."""
        rows, most = self.num_speculative_tokens + 1, self.max_decoding_tokens
        if self.tree is None and self.dynamic_tree_max_topk is None:
            for name in ("max_path_len", "max_decoding_tokens"):
                limit = getattr(self, name)
                if limit is not None and limit < rows:
                    raise ConfigError(
                        f"{name} {limit} is below the {rows} nodes, root included, of a chain with "
                        f"num_speculative_tokens {rows - 1}; raise {name}, or lower num_speculative_tokens"
                    )
        for name in ("max_path_len", "max_non_leaves_per_layer"):
            limit = getattr(self, name)
            if limit is not None and most is not None and limit > most:
                raise ConfigError(f"{name} {limit} is above max_decoding_tokens {most}, all nodes of the tree")

    def _check_specpv(self) -> None:
        """Refuse what SpecPV does not have, and its sizes where it is off."""
        if self.specpv_lossless:
            for name in ("tree", "dynamic_tree_max_topk", "simulated_acceptance", "simulated_accept_length"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"specpv_lossless goes with chains and their own acceptance, and {name} is given")
        if self.enable_specpv and self.adaptive_width:
            raise ConfigError("enable_specpv goes with a fixed number of drafts, and adaptive_width chooses it again")
        if not self.enable_specpv:
            for option in options_of(SpeculativeConfig):
                if option.name.startswith("specpv_") and getattr(self, option.name) != option.default:
                    raise ConfigError(f"{option.name} is an option of SpecPV, and enable_specpv is off")

    def _check_wide(self) -> None:
        """Refuse what wide steps do not have, and a capacity for named texts that holds no token and its end."""
        if self.draft_text_tokens == 1:
            raise ConfigError("draft_text_tokens must be 0, or 2 or more, a token and the text's end, got 1")
        if not self.wide_rows:
            return
        if self.wide_rows not in WIDE_ROWS:
            raise ConfigError(f"wide_rows must be 0, {' or '.join(map(str, WIDE_ROWS))}, got {self.wide_rows}")
        if not self.num_speculative_tokens:
            raise ConfigError("wide_rows goes with drafts that were right so far, and num_speculative_tokens is 0")
        for name in ("adaptive_width", "enable_specpv", "simulated_acceptance", "simulated_accept_length"):
            if getattr(self, name) not in (None, False):
                raise ConfigError(f"wide_rows {self.wide_rows} is not implemented for {name}; leave one of them out")

    def _check_block(self) -> None:
        """Refuse what longer blocks of drafts do not have."""
        if not self.max_block_drafts:
            return
        for name in ("adaptive_width", "enable_specpv", "tree", "dynamic_tree_max_topk"):
            if getattr(self, name) not in (None, False):
                raise ConfigError(f"max_block_drafts is not implemented for {name}; leave one of them out")
        if not 0 < self.num_speculative_tokens < self.max_block_drafts:
            raise ConfigError(
                f"max_block_drafts must be more than num_speculative_tokens, which must be 1 or more; got "
                f"{self.max_block_drafts} and {self.num_speculative_tokens}"
            )

    def _check_method(self) -> None:
        """The options of the method, and that none of another method was given."""
        own = METHOD_OPTIONS[self.method]
        own += () if self.text_drafts is None else METHOD_OPTIONS[self.text_drafts]
        for method, names in METHOD_OPTIONS.items():
            for name in names:
                if name not in own and getattr(self, name) != getattr(SpeculativeConfig, name):
                    raise ConfigError(f"{name} is an option of method {method!r}, and method is {self.method!r}")
        if self.text_drafts is not None:
            for name in ("tree", "dynamic_tree_max_topk"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"text_drafts {self.text_drafts!r} goes with a chain, and {name} asks for more")
        if self.draft_vocab_size is not None and self.draft_vocab is None:
            raise ConfigError(
                f"draft_vocab_size {self.draft_vocab_size} is of the tokens of a file, and draft_vocab names none"
            )
        given = isinstance(self.model, (str, Path)) and str(self.model)
        if not given and (self.method in NEEDS_MODEL or self.model is not None):
            raise ConfigError(
                f"model must be the path of a draft model's directory for method {self.method!r}, "
                f"got {self.model!r:.80}"
            )
        check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max, ConfigError)

    def _check_dynamic_tree(self) -> None:
        """That the options of a dynamic tree go together; whether there is such a tree is its shape's to say."""
        if self.dynamic_tree_max_topk is None:
            for name in _DYNAMIC:
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is an option of a dynamic tree, which dynamic_tree_max_topk asks for")
            return
        for name in ("tree", "max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} is an option of static trees, and dynamic_tree_max_topk makes a dynamic one")
        default = type(self).num_speculative_tokens
        if self.max_draft_len is not None and self.num_speculative_tokens == default:
            object.__setattr__(self, "num_speculative_tokens", self.max_draft_len)
        if self.max_draft_len not in (None, self.num_speculative_tokens):
            raise ConfigError(
                f"max_draft_len {self.max_draft_len} is not num_speculative_tokens {self.num_speculative_tokens}; "
                "give one of them, or the same"
            )


@dataclass(frozen=True)
class TraceConfig:
    """The debug traces to log, on the logger `lowlat.trace`; all off, and then they cost nothing."""

    step: bool = False
    accept: bool = False
    kv: bool = False
    tree: bool = False

    def __post_init__(self) -> None:
        check_options(self, ConfigError)


@documented
@dataclass(frozen=True, repr=False)
class RuntimeConfig:
    """Sizes and policies of one Runtime."""

    max_batch: int = declare(4, "Requests that decode together.", 1, 8)
    max_context: int = declare(2048, "Tokens of prompt and text.", 2, 1 << 20, otherwise="2048, or the model's if less")
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
    max_prefill_chunks: int = declare(
        16,
        "Chunks of a prompt that run at once while nobody decodes: more read it sooner, and take memory.",
        1,
        64,
        rare=True,
    )
    max_stall_ms: float = declare(
        25.0,
        "Chunks that run at once while others decode are as many as take no longer, but one at least.",
        1.0,
        10000.0,
        rare=True,
    )
    kv_blocks: int | None = declare(
        None,
        "KV blocks in the pool; layers of windows have their own.",
        2,
        (1 << 31) - 1,
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
        32.0, "Size of the cache_dir, GiB: the files used longest ago go first.", 0.001, 1e6, rare=True
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

    if TYPE_CHECKING:  # callers may give more than a field's own type

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
        """The kinds of checks that each step makes. Raises ConfigError for a name that is none."""
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
        raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
    return RuntimeConfig(**values)
