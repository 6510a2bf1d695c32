"""This module defines the options of speculation. They are frozen and checked at construction; errors name the option.

The load checks what depends on the model, such as boundaries against layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

from lowlat.errors import ConfigError
from lowlat.options.acceptance import acceptance_for
from lowlat.options.declaration import check_integer, check_options, declare, documented, given_options
from lowlat.options.default_length import DEFAULT_LENGTH
from lowlat.options.limits import LimitCheck, compare_limits
from lowlat.options.method_options import METHOD_OPTIONS
from lowlat.options.speculative_checks import WIDE_ROWS, check_together

if TYPE_CHECKING:
    from lowlat.options.keywords import SpeculativeOptions

__all__ = ["MAX_SPECULATIVE_TOKENS", "SpeculativeConfig"]

MAX_SPECULATIVE_TOKENS = 7
MAX_DECODING_TOKENS = 64
MAX_TOPK = 16
MAX_DRAFT_TOKENS = 31  # drafts of a dynamic tree; with its root 32 rows
MAX_LOOKUP = 16
MAX_DEPTH = 32
MAX_BLOCK_DRAFTS = WIDE_ROWS[0] - 1  # drafts that a wide step verifies
MAX_DRAFT_TEXT = 1 << 18

_SIZES = frozenset({"num_speculative_tokens", "max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer"})


class Limited(Protocol):
    """The part of a runtime that `SpeculativeConfig.check` uses."""

    @property
    def speculation_limits(self) -> Mapping[str, Any]:
        """The options that it was loaded with, by name; empty without speculation."""


@documented
@dataclass(frozen=True, repr=False)
class SpeculativeConfig:
    """SpeculativeConfig says how to speculate: the method, the depth, and the tree.

    `method` names the method. "eagle3", "peagle", "dflash" and "dspark" use a draft model of that kind, `model`, a
    directory or `ORG/NAME[@REVISION]`. "draft_model" uses any smaller model with the target's vocabulary. "mtp" uses
    the target's own multi-token prediction layer, from its files. "auto" chooses the method of `model`, else "mtp".
    "ngram" needs no model: it looks for an earlier occurrence of the longest suffix of the text, of `prompt_lookup_min`
    to `prompt_lookup_max` tokens, and drafts what followed it. "suffix" needs no model either: it drafts what most
    often followed endings of the text. With `text_drafts` EAGLE3 also gets such drafts: each step verifies, for each
    slot, the drafts of which more should be accepted. With `wide_rows` 15 or 31 such drafts are verified at a time
    while the text copies from itself, or from texts that the request names (`draft_text_tokens`).

    `num_speculative_tokens` is S, the draft length. The string "auto" means `adaptive_width` with S up to 7. A chain
    verifies S + 1 rows a slot. `tree` is a path, or a list of paths, each a list of child ranks; None means a chain.
    Limits of the tree that are None fit the tree. `dynamic_tree_max_topk` makes a tree whose nodes each step chooses:
    at each of `max_draft_len` levels (S) it considers this many of the likeliest tokens after each of this many best
    drafts of the level before. Of all these, the `max_total_draft_tokens` best are verified.

    With `enable_specpv` the target's layers without windows verify over a part of their KV cache: sink blocks, blocks
    that each head chose, and the last blocks. Every few steps a pass over the whole cache recomputes what was written
    meanwhile, and chooses again. SpecPV is lossy: tokens may differ from the target's, and every place that shows it
    says so. With `specpv_lossless` passes over the whole cache verify these proposals, and tokens are the target's.

    Boundary b of `capture_layers` is the residual stream entering layer b. Without `strict`, a draft model that does
    not fit causes one warning, and decoding goes on without speculation.
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
        DEFAULT_LENGTH,
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

    if TYPE_CHECKING:  # callers may pass more types than a field has

        def __init__(
            self, model: str | Path | None = None, method: str = "eagle3", **options: Unpack[SpeculativeOptions]
        ) -> None: ...

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        self._settle_depth()
        if self.capture_layers is not None:
            if not isinstance(self.capture_layers, (tuple, list)):
                raise ConfigError(f"capture_layers must be a list of boundaries, got {self.capture_layers!r:.80}")
            for layer in self.capture_layers:
                check_integer("capture_layers", layer, 0, 1 << 16, ConfigError)
            object.__setattr__(self, "capture_layers", tuple(self.capture_layers))
        check_together(self)

    def _settle_depth(self) -> None:
        """Replace "auto" by a number, and a missing draft length by a dynamic tree's depth."""
        if str(self.num_speculative_tokens) == "auto":
            object.__setattr__(self, "num_speculative_tokens", MAX_SPECULATIVE_TOKENS)
            object.__setattr__(self, "adaptive_width", True)
        is_dynamic = self.dynamic_tree_max_topk is not None and self.max_draft_len is not None
        if is_dynamic and self.num_speculative_tokens == type(self).num_speculative_tokens:
            object.__setattr__(self, "num_speculative_tokens", self.max_draft_len)

    def __repr__(self) -> str:
        return given_options(self)

    @property
    def imposed_acceptance(self) -> float | None:
        """The imposed acceptance probability of each draft; None: drafts are accepted as they agree."""
        if self.simulated_accept_length is None:
            return self.simulated_acceptance
        return acceptance_for(self.simulated_accept_length, self.num_speculative_tokens)

    def check(self, runtime: "Limited") -> list[LimitCheck]:
        """Compare this configuration with what a runtime was loaded with, option by option.

        A size up to the runtime's fits; another method, or other boundaries, need another load. A chain without given
        limits has those that its draft length needs.
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
