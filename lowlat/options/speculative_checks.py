"""This module checks which options of speculation go together, with which method, and within which limits."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowlat.errors import ConfigError
from lowlat.options.acceptance import acceptance_for
from lowlat.options.declaration import check_integer, options_of
from lowlat.options.method_options import METHOD_OPTIONS, NEEDS_MODEL

if TYPE_CHECKING:
    from lowlat.options.speculative import SpeculativeConfig

__all__ = ["WIDE_ROWS", "check_together"]

WIDE_ROWS = (16, 32)  # rows of a slot in wide steps


def check_together(options: "SpeculativeConfig") -> None:
    """Refuse options that exclude each other, by name. Raises ConfigError."""
    _check_method(options)
    _check_dynamic_tree(options)
    _check_limits(options)
    _check_adaptive(options)
    _check_specpv(options)
    _check_wide(options)
    _check_block(options)
    _check_simulated(options)


def _check_method(options: "SpeculativeConfig") -> None:
    """Check the options of the method, and that none of another method was given."""
    own = METHOD_OPTIONS[options.method]
    own += () if options.text_drafts is None else METHOD_OPTIONS[options.text_drafts]
    for method, names in METHOD_OPTIONS.items():
        for name in names:
            if name not in own and getattr(options, name) != getattr(type(options), name):
                raise ConfigError(f"{name} is an option of method {method!r}, and method is {options.method!r}")
    if options.text_drafts is not None:
        for name in ("tree", "dynamic_tree_max_topk"):
            if getattr(options, name) is not None:
                raise ConfigError(f"text_drafts {options.text_drafts!r} goes with a chain, and {name} asks for more")
    if options.draft_vocab_size is not None and options.draft_vocab is None:
        raise ConfigError(
            f"draft_vocab_size {options.draft_vocab_size} is of the tokens of a file, and draft_vocab names none"
        )
    given = isinstance(options.model, (str, Path)) and str(options.model)
    if not given and (options.method in NEEDS_MODEL or options.model is not None):
        raise ConfigError(
            f"model must be the path of a draft model's directory for method {options.method!r}, "
            f"got {options.model!r:.80}"
        )
    check_integer("prompt_lookup_min", options.prompt_lookup_min, 1, options.prompt_lookup_max, ConfigError)


def _check_dynamic_tree(options: "SpeculativeConfig") -> None:
    """Check that the options of a dynamic tree go together; another check decides whether its shape is valid."""
    if options.dynamic_tree_max_topk is None:
        for name in ("max_draft_len", "max_total_draft_tokens"):
            if getattr(options, name) is not None:
                raise ConfigError(f"{name} is an option of a dynamic tree, which dynamic_tree_max_topk asks for")
        return
    for name in ("tree", "max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{name} is an option of static trees, and dynamic_tree_max_topk makes a dynamic one")
    if options.max_draft_len not in (None, options.num_speculative_tokens):
        raise ConfigError(
            f"max_draft_len {options.max_draft_len} is not num_speculative_tokens {options.num_speculative_tokens}; "
            "give one of them, or the same"
        )


def _check_limits(options: "SpeculativeConfig") -> None:
    """Refuse limits that a chain of this draft length exceeds, and limits that exclude each other."""
    rows, most = options.num_speculative_tokens + 1, options.max_decoding_tokens
    if options.tree is None and options.dynamic_tree_max_topk is None:
        for name in ("max_path_len", "max_decoding_tokens"):
            limit = getattr(options, name)
            if limit is not None and limit < rows:
                raise ConfigError(
                    f"{name} {limit} is below the {rows} nodes, root included, of a chain with "
                    f"num_speculative_tokens {rows - 1}; raise {name}, or lower num_speculative_tokens"
                )
    for name in ("max_path_len", "max_non_leaves_per_layer"):
        limit = getattr(options, name)
        if limit is not None and most is not None and limit > most:
            raise ConfigError(f"{name} {limit} is above max_decoding_tokens {most}, all nodes of the tree")


def _check_adaptive(options: "SpeculativeConfig") -> None:
    """Refuse adaptive draft lengths for a tree, or without drafts."""
    trees = [name for name in ("tree", "dynamic_tree_max_topk") if getattr(options, name) is not None]
    if options.adaptive_width and (trees or not options.num_speculative_tokens):
        problem = f"{trees[0]} asks for one of its own" if trees else "num_speculative_tokens is 0"
        raise ConfigError(f"adaptive_width chooses among chains of at least one draft, and {problem}")


def _check_specpv(options: "SpeculativeConfig") -> None:
    """Refuse options that SpecPV does not support, and its sizes if it is off."""
    if options.specpv_lossless:
        for name in ("tree", "dynamic_tree_max_topk", "simulated_acceptance", "simulated_accept_length"):
            if getattr(options, name) is not None:
                raise ConfigError(f"specpv_lossless goes with chains and their own acceptance, and {name} is given")
    if options.enable_specpv and options.adaptive_width:
        raise ConfigError("enable_specpv goes with a fixed number of drafts, and adaptive_width chooses it again")
    if not options.enable_specpv:
        record: Any = type(options)
        for option in options_of(record):
            if option.name.startswith("specpv_") and getattr(options, option.name) != option.default:
                raise ConfigError(f"{option.name} is an option of SpecPV, and enable_specpv is off")


def _check_wide(options: "SpeculativeConfig") -> None:
    """Refuse options that wide steps do not support, and a capacity of named texts below a token and its end."""
    if options.draft_text_tokens == 1:
        raise ConfigError("draft_text_tokens must be 0, or 2 or more, a token and the text's end, got 1")
    if not options.wide_rows:
        return
    if options.wide_rows not in WIDE_ROWS:
        raise ConfigError(f"wide_rows must be 0, {' or '.join(map(str, WIDE_ROWS))}, got {options.wide_rows}")
    if not options.num_speculative_tokens:
        raise ConfigError("wide_rows goes with drafts that were right so far, and num_speculative_tokens is 0")
    for name in ("adaptive_width", "enable_specpv", "simulated_acceptance", "simulated_accept_length"):
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"wide_rows {options.wide_rows} is not implemented for {name}; leave one of them out")


def _check_block(options: "SpeculativeConfig") -> None:
    """Refuse options that longer blocks of drafts do not support."""
    if not options.max_block_drafts:
        return
    for name in ("adaptive_width", "enable_specpv", "tree", "dynamic_tree_max_topk"):
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"max_block_drafts is not implemented for {name}; leave one of them out")
    if not 0 < options.num_speculative_tokens < options.max_block_drafts:
        raise ConfigError(
            f"max_block_drafts must be more than num_speculative_tokens, which must be 1 or more; got "
            f"{options.max_block_drafts} and {options.num_speculative_tokens}"
        )


def _check_simulated(options: "SpeculativeConfig") -> None:
    """Refuse an imposed acceptance that is said twice, or that cannot be."""
    length = options.simulated_accept_length
    if length is None:
        return
    if isinstance(length, bool) or not isinstance(length, (int, float)):
        raise ConfigError(f"simulated_accept_length must be a number, got {length!r:.80}")
    if options.simulated_acceptance is not None:
        raise ConfigError("simulated_acceptance and simulated_accept_length say the same; give one of them")
    acceptance_for(length, options.num_speculative_tokens)  # raises for an impossible length
