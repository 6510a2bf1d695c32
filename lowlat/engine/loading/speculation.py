"""This module loads and checks the speculator of a target, and decides its topology for each draft length."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lowlat.errors import ConfigError
from lowlat.models.target import OpenedTarget
from lowlat.options.runtime import FEW_SLOTS, RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, Speculator
from lowlat.speculators.default_length import with_default_length, with_plain_length
from lowlat.speculators.methods import fetch_speculator, load_speculator, settled
from lowlat.speculators.tree.dynamic import DEFAULT_DRAFT_TOKENS, DynamicTree, Topology
from lowlat.speculators.tree.topology import TreeTopology

__all__ = ["Speculation", "load_speculation", "make_topologies"]

logger = logging.getLogger("lowlat")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Speculation:
    """The speculation of a runtime: the requested options, and the loaded speculator.

    asked       the options, with method and draft length settled; None: there are none
    loaded      the speculator with its weights; None: there is none
    topologies  the chain or tree of drafts, by draft length
    error       why requested speculation is not in use; None: it is in use, or was not requested
    """

    asked: SpeculativeConfig | None
    loaded: LoadedSpeculator | None
    topologies: dict[int, Topology]
    error: str | None = None

    @property
    def used(self) -> SpeculativeConfig | None:
        """The options of the speculator; None without one."""
        return None if self.loaded is None else self.asked

    @property
    def speculator(self) -> Speculator | None:
        """The speculator; None without one."""
        return None if self.loaded is None else self.loaded.speculator

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The speculator's own weights, by canonical name."""
        return {} if self.loaded is None else self.loaded.weights


def load_speculation(
    target: OpenedTarget,
    speculative: SpeculativeConfig | None,
    options: RuntimeConfig,
    downloaded: Progress | None = None,
) -> Speculation:
    """Load a target's speculator, and decide its topologies.

    Raises ConfigError for a speculator that cannot be used if `speculative.strict` or perf_mode is strict.
    """
    asked, max_batch = fit_slots(speculative, options.max_batch), options.max_batch
    baseline: dict[int, Topology] = {0: TreeTopology.chain(0)}
    if asked is None or not asked.enabled:
        return Speculation(with_plain_length(asked), None, baseline)
    topologies = make_topologies(asked, max_batch)
    try:
        asked = settled(asked, target.directory)
        loaded = load_speculator(fetch_speculator(asked, target.config, downloaded), target.config, target)
    except ConfigError as error:
        if asked.strict or options.is_strict:
            raise
        logger.warning("speculation is off, decoding goes on without it: %s", error)
        return Speculation(with_plain_length(asked), None, baseline, str(error))
    for note in loaded.notes:
        logger.info("draft model %s: %s", loaded.directory, note)
    may_choose = not options.forced_rows
    chosen = with_default_length(asked, target.config, loaded.speculator, max_batch, may_choose=may_choose)
    if chosen is not asked:
        topologies = make_topologies(chosen, max_batch)
    _warn_of_positions(loaded.speculator, options.max_context)
    return Speculation(with_plain_length(chosen), loaded, topologies)


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


def _warn_of_positions(speculator: Speculator, max_context: int) -> None:
    """Warn if max_context exceeds the draft model's positions: tokens stay right, but few drafts are accepted."""
    draft = speculator.draft_config
    if draft is not None and speculator.attends_everything and max_context > draft.max_position:
        logger.warning(
            "the draft model has %d positions (max_position_embeddings) and max_context is %d: beyond them few of its "
            "drafts are accepted; draft_window (--draft-window), say 512, keeps an EAGLE3 or P-EAGLE draft model's "
            "attention to so many of the last positions", draft.max_position, max_context,
        )  # fmt: skip
