"""Loads and checks the speculator of a target, and settles what it drafts by draft length."""

import logging
from collections.abc import Callable

from lowlat.errors import ConfigError
from lowlat.models.target import OpenedTarget
from lowlat.options.runtime import FEW_SLOTS
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, Speculator
from lowlat.speculators.default_length import with_default_length
from lowlat.speculators.methods import fetch_speculator, load_speculator, settled
from lowlat.speculators.tree.dynamic import DEFAULT_DRAFT_TOKENS, DynamicTree, Topology
from lowlat.speculators.tree.topology import TreeTopology

__all__ = ["load_speculation", "make_topologies", "say_where_drafts_fail"]

logger = logging.getLogger("lowlat")
Progress = Callable[[int, int], None]


def load_speculation(
    target: OpenedTarget,
    speculative: SpeculativeConfig | None,
    max_batch: int,
    downloaded: Progress | None,
    *,
    must_fit: bool,
    may_choose: bool,
) -> tuple[SpeculativeConfig | None, LoadedSpeculator | None, dict[int, Topology], str | None]:
    """The options with their method settled, the speculator, what it drafts by draft length, and why there is none."""
    baseline: dict[int, Topology] = {0: TreeTopology.chain(0)}
    if speculative is None or not speculative.enabled:
        return speculative, None, baseline, None
    topologies = make_topologies(speculative, max_batch)
    try:
        speculative = settled(speculative, target.directory)
        loaded = load_speculator(fetch_speculator(speculative, target.config, downloaded), target.config, target)
    except ConfigError as error:
        if speculative.strict or must_fit:
            raise
        logger.warning("speculation is off, decoding goes on without it: %s", error)
        return speculative, None, baseline, str(error)
    for note in loaded.notes:
        logger.info("draft model %s: %s", loaded.directory, note)
    chosen = with_default_length(speculative, target.config, loaded.speculator, max_batch, may_choose=may_choose)
    if chosen is not speculative:
        speculative, topologies = chosen, make_topologies(chosen, max_batch)
    return speculative, loaded, topologies, None


def make_topologies(speculative: SpeculativeConfig, max_batch: int = 1) -> dict[int, Topology]:
    """The topology for each depth S: chains of every depth, and of a longer block; or the baseline and the tree.

    Of more than FEW_SLOTS slots, which have more buckets, chains are no longer than what was asked for. Raises
    ConfigError.
    """
    depth, top_k = speculative.num_speculative_tokens, speculative.dynamic_tree_max_topk
    if top_k is not None:
        drafts = speculative.max_total_draft_tokens or DEFAULT_DRAFT_TOKENS
        return {0: TreeTopology.chain(0), depth: DynamicTree(depth, top_k, drafts + 1)}
    if speculative.tree is None:
        is_limited, longer = speculative.adaptive_width or max_batch > FEW_SLOTS, speculative.max_block_drafts
        most = speculative.num_speculative_tokens if is_limited else MAX_SPECULATIVE_TOKENS
        return {s: TreeTopology.line(s + 1) for s in (*range(most + 1), *([longer] if longer else []))}
    tree = TreeTopology.load(
        speculative.tree,
        max_path_len=speculative.max_path_len,
        max_decoding_tokens=speculative.max_decoding_tokens,
        max_non_leaves_per_layer=speculative.max_non_leaves_per_layer,
    )
    if tree.depth != speculative.num_speculative_tokens:
        raise ConfigError(
            f"the tree is {tree.depth} deep but num_speculative_tokens is {speculative.num_speculative_tokens}; "
            "set it to the tree's depth"
        )
    return {0: TreeTopology.chain(0), tree.depth: tree}


def say_where_drafts_fail(speculator: Speculator | None, max_context: int) -> None:
    """Warn of a draft model that attends to more positions than it has: tokens stay right, and drafts are wrong."""
    draft = None if speculator is None else speculator.draft_config
    if (
        draft is not None
        and speculator is not None
        and speculator.attends_everything
        and max_context > draft.max_position
    ):
        logger.warning(
            "the draft model has %d positions (max_position_embeddings) and max_context is %d: beyond them few of its "
            "drafts are accepted; draft_window (--draft-window), say 512, keeps an EAGLE3 or P-EAGLE draft model's "
            "attention to so many of the last positions", draft.max_position, max_context,
        )  # fmt: skip
