"""This module lists the methods of speculation with their options."""

__all__ = ["AUTO_METHOD", "METHOD_OPTIONS", "NEEDS_MODEL", "TEXT_METHODS"]

_STATIC = ("tree", "max_path_len", "max_non_leaves_per_layer")
_TREES = (*_STATIC, "dynamic_tree_max_topk", "max_draft_len", "max_total_draft_tokens")
_VOCABULARY = ("draft_vocab", "draft_vocab_size")
# The options of each method. With other methods they must keep their defaults. Options not listed are for all methods.
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
TEXT_METHODS = tuple(method for method in METHOD_OPTIONS if method not in (*NEEDS_MODEL, "mtp"))  # draft from text only
AUTO_METHOD = "auto"  # the load chooses the method from the models' files
METHOD_OPTIONS[AUTO_METHOD] = tuple(
    dict.fromkeys(name for method, names in METHOD_OPTIONS.items() if method in (*NEEDS_MODEL, "mtp") for name in names)
)
